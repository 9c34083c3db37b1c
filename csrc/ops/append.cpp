#include "ops/launch.h"
#include "ops/ops.h"
#include "ops/tbq4_planes.h"

namespace flashq {
namespace {

// k and v (T, Hkv, D) of one dtype, and the slot of each token.
AppendSource view_source(const Op& op, const Tensor& k, const Tensor& v, const Tensor& slots) {
  AppendSource source{};
  source.dtype = expect_float_dtype(op, "k", k, true);
  expect_shape(op, "k", k, {{"T"}, {"Hkv"}, {"D"}});
  expect_same_dtype(op, "v", v, "k", k);
  expect_same_device(op, "v", v, "k", k);
  expect_shape(op, "v", v, {{"T", k.size(0)}, {"Hkv", k.size(1)}, {"D", k.size(2)}});
  expect_unit_last_stride(op, "k", k);
  expect_unit_last_stride(op, "v", v);
  source.k = k.const_data_ptr();
  source.v = v.const_data_ptr();
  for (int i = 0; i < 2; ++i) {
    source.k_stride[i] = k.stride(i);
    source.v_stride[i] = v.stride(i);
  }
  source.tokens = k.size(0);
  source.kv_heads = k.size(1);
  source.head_dim = k.size(2);
  source.slots = index_view(op, "slots", slots, {{"T", k.size(0)}}, "k", k);
  return source;
}

}  // namespace

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
  expect_shape(op, "k", k, {{"T"}, {"Hkv"}, {"D"}});
  const int64_t kv_heads = k.size(1), head_dim = k.size(2);
  expect_tbq4_head_dim(op, "k", head_dim);
  const Planes planes = view_planes(op, {k_codes, k_norms, v_codes, v_norms}, head_dim, kv_heads, "k", k);
  Tbq4AppendParams params{};
  params.source = view_source(op, k, v, slots);
  params.k_codes = static_cast<uint8_t*>(k_codes.mutable_data_ptr());
  params.v_codes = static_cast<uint8_t*>(v_codes.mutable_data_ptr());
  params.k_norms = static_cast<uint16_t*>(k_norms.mutable_data_ptr());
  params.v_norms = static_cast<uint16_t*>(v_norms.mutable_data_ptr());
  params.num_pages = planes.pages;
  params.page_size = planes.page_size;
  params.k_offsets = view_offsets(op, k_offsets, planes.pages, kv_heads, head_dim, "k", k, params.k_offsets_stride);
  params.reject_nonfinite = call.on_cpu() && check_mode();
  call.check_values(params);
  call.run(&Backend::tbq4_append, params);
}

}  // namespace flashq
