#include <vector>

#include "core/tbq4/codebook.h"
#include "ops/launch.h"
#include "ops/ops.h"

namespace flashq {
namespace {

// x (..., D): up to kMaxLeading leading dimensions of any stride, unit last stride.
RowsView view_rows(const Op& op, const char* argument, const Tensor& t) {
  if (t.dim() < 1 || t.dim() > kMaxLeading + 1)
    op.refuse(argument, "1 to " + std::to_string(kMaxLeading + 1) + " dimensions", "shape " + shape_of(t));
  expect_unit_last_stride(op, argument, t);
  RowsView view{};
  view.data = t.const_data_ptr();
  view.leading = static_cast<int32_t>(t.dim() - 1);
  view.rows = 1;
  for (int i = 0; i < view.leading; ++i) {
    view.size[i] = t.size(i);
    view.stride[i] = t.stride(i);
    view.rows *= t.size(i);
  }
  view.head_dim = t.size(view.leading);
  return view;
}

RowsView view_values(const Op& op, const Tensor& x) {
  const Dtype dtype = expect_float_dtype(op, "x", x, true);
  RowsView view = view_rows(op, "x", x);
  view.dtype = dtype;
  expect_tbq4_head_dim(op, "x", view.head_dim);
  return view;
}

std::vector<int64_t> with_last(const Tensor& t, int64_t last) {
  std::vector<int64_t> size(t.sizes().begin(), t.sizes().end());
  size.back() = last;
  return size;
}

}  // namespace

Results tbq4_quantize(const Tensor& x) {
  constexpr Op op("tbq4_quantize");
  expect_given(op, {{"x", x}});
  const Call call(op, x);
  Tbq4QuantizeParams params{};
  params.x = view_values(op, x);
  const int64_t head_dim = params.x.head_dim;
  Tensor codes = call.empty(with_last(x, head_dim / 2), ScalarType::Byte);
  Tensor norms = call.empty(with_last(x, head_dim / tbq4::block_width(head_dim)), ScalarType::Half);
  params.codes = static_cast<uint8_t*>(codes.mutable_data_ptr());
  params.norms = static_cast<uint16_t*>(norms.mutable_data_ptr());
  params.reject_nonfinite = call.on_cpu() && check_mode();
  call.run(&Backend::tbq4_quantize, params);
  return {codes, norms};
}

Tensor tbq4_dequantize(const Tensor& codes, const Tensor& norms, OptionalDtype dtype) {
  constexpr Op op("tbq4_dequantize");
  expect_given(op, {{"codes", codes}, {"norms", norms}});
  const Call call(op, codes);
  expect_dtype(op, "codes", codes, {ScalarType::Byte});
  expect_dtype(op, "norms", norms, {ScalarType::Half});
  expect_same_device(op, "norms", norms, "codes", codes);
  Tbq4DequantizeParams params{};
  params.codes = view_rows(op, "codes", codes);
  params.norms = view_rows(op, "norms", norms);
  const int64_t head_dim = 2 * params.codes.head_dim;
  expect_tbq4_head_dim(op, "codes", head_dim);
  params.codes.head_dim = params.norms.head_dim = head_dim;
  const std::vector<int64_t> expected = with_last(codes, head_dim / tbq4::block_width(head_dim));
  if (std::vector<int64_t>(norms.sizes().begin(), norms.sizes().end()) != expected)
    op.refuse("norms",
              "codes' shape with " + std::to_string(expected.back()) + " as the last dimension, for codes of shape " +
                  shape_of(codes),
              "shape " + shape_of(norms));
  const ScalarType out_dtype = dtype.value_or(ScalarType::Float);
  if (out_dtype != ScalarType::Float && out_dtype != ScalarType::Half && out_dtype != ScalarType::BFloat16)
    op.refuse("dtype", "None (torch.float32), torch.float16, torch.bfloat16 or torch.float32", to_text(out_dtype));
  Tensor out = call.empty(with_last(codes, head_dim), out_dtype);
  params.out = out.mutable_data_ptr();
  params.out_dtype = expect_float_dtype(op, "dtype", out, true);
  call.run(&Backend::tbq4_dequantize, params);
  return out;
}

Tensor tbq4_rotate(const Tensor& x, bool inverse) {
  constexpr Op op("tbq4_rotate");
  expect_given(op, {{"x", x}});
  const Call call(op, x);
  Tbq4RotateParams params{};
  params.x = view_values(op, x);
  params.inverse = inverse;
  Tensor out = call.empty(x.sizes(), x.scalar_type());
  params.out = out.mutable_data_ptr();
  call.run(&Backend::tbq4_rotate, params);
  return out;
}

}  // namespace flashq
