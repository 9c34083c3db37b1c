#include "ops/append_args.h"

namespace flashq {

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

void view_tbq4_append(const Op& op, const Call& call, const Tensor& k, const Tensor& v, const PlaneTensors& planes,
                      const Tensor& slots, const OptionalTensor& k_offsets, Tbq4AppendParams& params) {
  expect_shape(op, "k", k, {{"T"}, {"Hkv"}, {"D"}});
  const int64_t kv_heads = k.size(1), head_dim = k.size(2);
  expect_tbq4_head_dim(op, "k", head_dim);
  const Planes view = view_planes(op, planes, head_dim, kv_heads, "k", k);
  params.source = view_source(op, k, v, slots);
  params.k_codes = static_cast<uint8_t*>(planes.k_codes.mutable_data_ptr());
  params.v_codes = static_cast<uint8_t*>(planes.v_codes.mutable_data_ptr());
  params.k_norms = static_cast<uint16_t*>(planes.k_norms.mutable_data_ptr());
  params.v_norms = static_cast<uint16_t*>(planes.v_norms.mutable_data_ptr());
  params.num_pages = view.pages;
  params.page_size = view.page_size;
  params.k_offsets = view_offsets(op, k_offsets, view.pages, kv_heads, head_dim, "k", k, params.k_offsets_stride);
  params.reject_nonfinite = call.on_cpu() && check_mode();
}

}  // namespace flashq
