#include "ops/append_args.h"
#include "ops/ops.h"

namespace flashq {
void kv_append_(const Tensor& k, const Tensor& v, const Tensor& k_cache, const Tensor& v_cache, const Tensor& slots) {
  constexpr Op op("kv_append_");
  expect_given(op, {{"k", k}, {"v", v}, {"k_cache", k_cache}, {"v_cache", v_cache}, {"slots", slots}});
  const Call call(op, k);
  expect_shape(op, "k", k, {{"T"}, {"Hkv"}, {"D"}});
  if (k_cache.dim() != 4) op.refuse("k_cache", "shape (P, N, Hkv, D)", "shape " + shape_of(k_cache));
  const int64_t pages = k_cache.size(0), page_size = k_cache.size(1);
  KvAppendParams params{};
  params.source = view_source(op, k, v, slots);
  for (const auto& [name, t] : {std::pair{"k_cache", &k_cache}, std::pair{"v_cache", &v_cache}}) {
    expect_same_dtype(op, name, *t, "k", k);
    expect_same_device(op, name, *t, "k", k);
    expect_shape(op, name, *t, {{"P", pages}, {"N", page_size}, {"Hkv", k.size(1)}, {"D", k.size(2)}});
    expect_unit_last_stride(op, name, *t);
  }
  params.k_cache = k_cache.mutable_data_ptr();
  params.v_cache = v_cache.mutable_data_ptr();
  for (int i = 0; i < 3; ++i) {
    params.k_stride[i] = k_cache.stride(i);
    params.v_stride[i] = v_cache.stride(i);
  }
  params.num_pages = pages;
  params.page_size = page_size;
  call.check_values(params);
  call.run(&Backend::kv_append, params);
}

void tbq4_append_(const Tensor& k, const Tensor& v, const Tensor& k_codes, const Tensor& k_norms, const Tensor& v_codes,
                  const Tensor& v_norms, const Tensor& slots, const OptionalTensor& k_offsets) {
  constexpr Op op("tbq4_append_");
  expect_given(op, {{"k", k},
                    {"v", v},
                    {"k_codes", k_codes},
                    {"k_norms", k_norms},
                    {"v_codes", v_codes},
                    {"v_norms", v_norms},
                    {"slots", slots}});
  const Call call(op, k);
  Tbq4AppendParams params{};
  view_tbq4_append(op, call, k, v, {k_codes, k_norms, v_codes, v_norms}, slots, k_offsets, params);
  call.check_values(params);
  call.run(&Backend::tbq4_append, params);
}

}  // namespace flashq
