#include "ops/attention_args.h"
#include "ops/tbq4_planes.h"

namespace flashq {
namespace {

// The exact pool in q's dtype: exact_k, exact_v (Pe, Ne, Hkv, D) and exact_block_table (B, W), all three or none.
void view_exact(const Op& op, const Tensor& q, const OptionalTensor& exact_k, const OptionalTensor& exact_v,
                const OptionalTensor& table, int64_t batch, int64_t kv_heads, int64_t exact_first, int64_t exact_last,
                Tbq4View& kv) {
  expect_at_least(op, "exact_first", exact_first, 0);
  expect_at_least(op, "exact_last", exact_last, 0);
  const int given = exact_k.has_value() + exact_v.has_value() + table.has_value();
  if (given != 3 && (given != 0 || exact_first > 0 || exact_last > 0))
    op.refuse(!exact_k   ? "exact_k"
              : !exact_v ? "exact_v"
                         : "exact_block_table",
              "exact_k, exact_v and exact_block_table together (exact_first and exact_last need all three)", "None");
  if (given == 0) return;
  // Longer than any sequence, and far from overflow.
  constexpr int64_t kAll = int64_t{1} << 40;
  kv.exact_first = min_of(exact_first, kAll);
  kv.exact_last = min_of(exact_last, kAll);
  if (exact_k->dim() != 4) op.refuse("exact_k", "shape (Pe, Ne, Hkv, D)", "shape " + shape_of(*exact_k));
  const int64_t pages = exact_k->size(0), page_size = exact_k->size(1), head_dim = q.size(q.dim() - 1);
  for (const auto& [name, t] : {std::pair{"exact_k", &*exact_k}, std::pair{"exact_v", &*exact_v}}) {
    expect_like_query(op, name, *t, q);
    expect_shape(op, name, *t, {{"Pe", pages}, {"Ne", page_size}, {"Hkv", kv_heads}, {"D", head_dim}});
  }
  kv.exact = {.k = exact_k->const_data_ptr(),
              .v = exact_v->const_data_ptr(),
              .k_stride = {exact_k->stride(0), exact_k->stride(1), exact_k->stride(2)},
              .v_stride = {exact_v->stride(0), exact_v->stride(1), exact_v->stride(2)},
              .num_pages = pages,
              .page_size = page_size,
              .block_table = index_view(op, "exact_block_table", *table, {{"B", batch}, {"W"}}, "q", q),
              .max_pages = table->size(1),
              .cu_seqlens_k = {}};
}

}  // namespace

Results tbq4_attention(const Tensor& q, const Tensor& k_codes, const Tensor& k_norms, const Tensor& v_codes,
                       const Tensor& v_norms, const Tensor& seqlens, const OptionalTensor& block_table,
                       const OptionalTensor& cu_seqlens_q, const OptionalTensor& kv_start, const OptionalTensor& sinks,
                       const OptionalTensor& k_offsets, const OptionalTensor& exact_k, const OptionalTensor& exact_v,
                       const OptionalTensor& exact_block_table, int64_t exact_first, int64_t exact_last,
                       int64_t max_seqlen_q, std::optional<double> scale, bool causal, int64_t window_left,
                       double softcap, int64_t kv_chunk, OptionalDtype out_dtype) {
  constexpr Op op("tbq4_attention");
  expect_given(op, {{"q", q},
                    {"k_codes", k_codes},
                    {"k_norms", k_norms},
                    {"v_codes", v_codes},
                    {"v_norms", v_norms},
                    {"seqlens", seqlens}});
  const Call call(op, q);
  if (k_codes.dim() != 4) op.refuse("k_codes", "shape (P, Hkv, N, D / 2)", "shape " + shape_of(k_codes));
  const int64_t kv_heads = k_codes.size(1);
  AttentionTbq4Params params{};
  fill_cache_params(op, call,
                    {.q = q,
                     .seqlens = seqlens,
                     .block_table = block_table,
                     .cu_seqlens_q = cu_seqlens_q,
                     .kv_start = kv_start,
                     .sinks = sinks,
                     .max_seqlen_q = max_seqlen_q,
                     .kv_chunk = kv_chunk,
                     .score = {scale, causal, window_left, kUnlimited, softcap},
                     .out_dtype = out_dtype},
                    kv_heads, "k_codes", params);
  expect_tbq4_head_dim(op, "q", params.query.head_dim);
  const Planes planes = view_planes(op, {k_codes, k_norms, v_codes, v_norms}, params.query.head_dim, kv_heads, "q", q);
  Tbq4View& kv = params.kv;
  kv.k_codes = planes.k_codes;
  kv.v_codes = planes.v_codes;
  kv.k_norms = planes.k_norms;
  kv.v_norms = planes.v_norms;
  kv.num_pages = planes.pages;
  kv.page_size = planes.page_size;
  kv.k_offsets =
      view_offsets(op, k_offsets, planes.pages, kv_heads, params.query.head_dim, "q", q, kv.k_offsets_stride);
  const int64_t batch = params.query.batch;
  view_exact(op, q, exact_k, exact_v, exact_block_table, batch, kv_heads, exact_first, exact_last, kv);
  view_block_table(op, block_table, q, batch, "k_codes", planes.pages, kv.block_table, kv.max_pages);
  call.check_values(params);
  Results results = make_outputs(op, call, q, out_dtype, params.query);
  call.run(&Backend::tbq4_attention, &Backend::attention_tbq4_scratch_bytes, params);
  return results;
}

}  // namespace flashq
