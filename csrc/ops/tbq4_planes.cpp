#include "ops/tbq4_planes.h"

#include "core/tbq4/codebook.h"

namespace flashq {

Planes view_planes(const Op& op, const PlaneTensors& t, int64_t head_dim, int64_t kv_heads, const char* other_name,
                   const Tensor& other) {
  if (t.k_codes.dim() != 4) op.refuse("k_codes", "shape (P, Hkv, N, D / 2)", "shape " + shape_of(t.k_codes));
  const int64_t pages = t.k_codes.size(0), page_size = t.k_codes.size(2),
                blocks = head_dim / tbq4::block_width(head_dim);
  for (const auto& [name, plane] : {std::pair{"k_codes", &t.k_codes}, std::pair{"v_codes", &t.v_codes}}) {
    expect_dtype(op, name, *plane, {ScalarType::Byte});
    expect_same_device(op, name, *plane, other_name, other);
    expect_shape(op, name, *plane, {{"P", pages}, {"Hkv", kv_heads}, {"N", page_size}, {"D / 2", head_dim / 2}});
    expect_contiguous(op, name, *plane);
  }
  for (const auto& [name, plane] : {std::pair{"k_norms", &t.k_norms}, std::pair{"v_norms", &t.v_norms}}) {
    expect_dtype(op, name, *plane, {ScalarType::Half});
    expect_same_device(op, name, *plane, other_name, other);
    expect_shape(op, name, *plane, {{"P", pages}, {"Hkv", kv_heads}, {"N", page_size}, {"D / block", blocks}});
    expect_contiguous(op, name, *plane);
  }
  return {.k_codes = static_cast<const uint8_t*>(t.k_codes.const_data_ptr()),
          .v_codes = static_cast<const uint8_t*>(t.v_codes.const_data_ptr()),
          .k_norms = static_cast<const uint16_t*>(t.k_norms.const_data_ptr()),
          .v_norms = static_cast<const uint16_t*>(t.v_norms.const_data_ptr()),
          .pages = pages,
          .page_size = page_size};
}

const uint16_t* view_offsets(const Op& op, const OptionalTensor& k_offsets, int64_t pages, int64_t kv_heads,
                             int64_t head_dim, const char* other_name, const Tensor& other, int64_t (&stride)[2]) {
  if (!k_offsets) return nullptr;
  const Tensor& t = *k_offsets;
  expect_dtype(op, "k_offsets", t, {ScalarType::Half});
  expect_same_device(op, "k_offsets", t, other_name, other);
  expect_shape(op, "k_offsets", t, {{"P", pages}, {"Hkv", kv_heads}, {"D", head_dim}});
  expect_unit_last_stride(op, "k_offsets", t);
  stride[0] = t.stride(0);
  stride[1] = t.stride(1);
  return static_cast<const uint16_t*>(t.const_data_ptr());
}

}  // namespace flashq
