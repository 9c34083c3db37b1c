#include "ops/attention_args.h"
#include "ops/tbq4_planes.h"

namespace flashq {

void tbq4_page_offsets_(const Tensor& k, const Tensor& k_codes, const Tensor& k_norms, const Tensor& k_offsets,
                        const Tensor& seqlens, const Tensor& block_table, const Tensor& cu_seqlens,
                        const OptionalTensor& kv_start, const OptionalTensor& exact_k,
                        const OptionalTensor& exact_block_table) {
  constexpr Op op("tbq4_page_offsets_");
  expect_given(op, {{"k", k},
                    {"k_codes", k_codes},
                    {"k_norms", k_norms},
                    {"k_offsets", k_offsets},
                    {"seqlens", seqlens},
                    {"block_table", block_table},
                    {"cu_seqlens", cu_seqlens}});
  const Call call(op, k);
  PageOffsetsParams p{};
  p.dtype = expect_float_dtype(op, "k", k, true);
  expect_shape(op, "k", k, {{"T"}, {"Hkv"}, {"D"}});
  expect_unit_last_stride(op, "k", k);
  p.tokens = k.size(0);
  p.kv_heads = k.size(1);
  p.head_dim = k.size(2);
  expect_tbq4_head_dim(op, "k", p.head_dim);
  p.k = k.const_data_ptr();
  p.k_stride[0] = k.stride(0);
  p.k_stride[1] = k.stride(1);
  // Values have no offsets: the keys' planes stand for both.
  const Planes planes = view_planes(op, {k_codes, k_norms, k_codes, k_norms}, p.head_dim, p.kv_heads, "k", k);
  p.k_codes = planes.k_codes;
  p.k_norms = planes.k_norms;
  p.num_pages = planes.pages;
  p.page_size = planes.page_size;
  (void)view_offsets(op, k_offsets, p.num_pages, p.kv_heads, p.head_dim, "k", k, p.k_offsets_stride);
  p.k_offsets = static_cast<uint16_t*>(k_offsets.mutable_data_ptr());
  p.batch = view_cu_seqlens(op, "cu_seqlens", cu_seqlens, k, p.cu_seqlens);
  p.seqlens = index_view(op, "seqlens", seqlens, {{"B", p.batch}}, "k", k);
  if (kv_start) p.kv_start = index_view(op, "kv_start", *kv_start, {{"B", p.batch}}, "k", k);
  p.block_table = index_view(op, "block_table", block_table, {{"B", p.batch}, {"max_pages"}}, "k", k);
  p.max_pages = block_table.size(1);
  if (exact_k.has_value() != exact_block_table.has_value())
    op.refuse(exact_k ? "exact_block_table" : "exact_k", "exact_k and exact_block_table together", "None");
  if (exact_k) {
    expect_like_query(op, "exact_k", *exact_k, k, "k");
    expect_shape(op, "exact_k", *exact_k, {{"Pe"}, {"Ne"}, {"Hkv", p.kv_heads}, {"D", p.head_dim}});
    p.exact.k = exact_k->const_data_ptr();
    for (int i = 0; i < 3; ++i) p.exact.k_stride[i] = exact_k->stride(i);
    p.exact.num_pages = exact_k->size(0);
    p.exact.page_size = exact_k->size(1);
    p.exact.block_table = index_view(op, "exact_block_table", *exact_block_table, {{"B", p.batch}, {"W"}}, "k", k);
    p.exact.max_pages = exact_block_table->size(1);
  }
  if (p.page_size == 0) {
    if (p.tokens > 0) op.refuse("k_codes", "pages of at least one token", "shape " + shape_of(k_codes));
    return;
  }
  call.check_values(p);
  call.run(&Backend::tbq4_page_offsets, p);
}

}  // namespace flashq
