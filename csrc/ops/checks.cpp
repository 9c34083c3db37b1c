#include "ops/checks.h"

#include <cstdio>
#include <stdexcept>

namespace flashq {
namespace {

template <class Values> std::string tuple_text(const Values& values) {
  std::string text = "(";
  for (size_t i = 0; i < values.size(); ++i) text += (i ? ", " : "") + std::to_string(values[i]);
  return text + (values.size() == 1 ? ",)" : ")");
}

std::string strides_text(const Tensor& t) {
  return "shape " + shape_of(t) + " with strides " + tuple_text(t.strides());
}

}  // namespace

void Op::refuse(std::string_view argument, std::string_view expected, std::string_view got) const {
  std::string text = "flashq::";
  text.append(name_).append(": ").append(argument).append(": expected ").append(expected).append(", got ").append(got);
  throw std::runtime_error(text);
}

void Op::fail(std::string_view message) const {
  throw std::runtime_error(std::string("flashq::") + name_ + ": " + std::string(message));
}

std::string to_text(ScalarType dtype) {
  switch (dtype) {
    case ScalarType::Float: return "torch.float32";
    case ScalarType::Half: return "torch.float16";
    case ScalarType::BFloat16: return "torch.bfloat16";
    case ScalarType::Double: return "torch.float64";
    case ScalarType::Byte: return "torch.uint8";
    case ScalarType::Char: return "torch.int8";
    case ScalarType::Short: return "torch.int16";
    case ScalarType::Int: return "torch.int32";
    case ScalarType::Long: return "torch.int64";
    case ScalarType::Bool: return "torch.bool";
    case ScalarType::ComplexFloat: return "torch.complex64";
    case ScalarType::ComplexDouble: return "torch.complex128";
    case ScalarType::Float8_e4m3fn: return "torch.float8_e4m3fn";
    case ScalarType::Float8_e5m2: return "torch.float8_e5m2";
    default: return "another dtype (" + std::to_string(static_cast<int>(dtype)) + ")";
  }
}

std::string to_text(double value) {
  char text[32];
  std::snprintf(text, sizeof text, "%.9g", value);
  return text;
}

std::string shape_of(const Tensor& t) { return tuple_text(t.sizes()); }

std::string device_of(const Tensor& t) {
  if (t.is_cpu()) return "cpu";
  return (t.is_cuda() ? "cuda:" : "another device, index ") + std::to_string(t.get_device_index());
}

void expect_given(const Op& op, std::initializer_list<NamedTensor> tensors) {
  for (const auto& [name, tensor] : tensors)
    if (!tensor.defined()) op.refuse(name, "a tensor", "None");
}

// Checks come before messages: the text of a message costs more than all checks of a call.
void expect_shape(const Op& op, const char* argument, const Tensor& t, Shape shape) {
  bool fits = t.dim() == static_cast<int64_t>(shape.size());
  int64_t i = 0;
  for (const Dim& dim : shape) {
    if (fits && dim.size != kAny && t.size(i) != dim.size) fits = false;
    ++i;
  }
  if (fits) return;
  std::string expected;
  for (const Dim& dim : shape) {
    expected += (expected.empty() ? "(" : ", ") + std::string(dim.name);
    if (dim.size != kAny) expected += " = " + std::to_string(dim.size);
  }
  op.refuse(argument, "shape " + expected + (shape.size() == 1 ? ",)" : ")"), "shape " + shape_of(t));
}

void expect_same_device(const Op& op, const char* argument, const Tensor& t, const char* other_name,
                        const Tensor& other) {
  if (t.device() != other.device())
    op.refuse(argument, "a tensor on " + device_of(other) + ", where " + other_name + " is", device_of(t));
}

void expect_dtype(const Op& op, const char* argument, const Tensor& t, std::initializer_list<ScalarType> allowed) {
  const ScalarType got = t.scalar_type();
  for (const ScalarType& dtype : allowed)
    if (got == dtype) return;
  std::string expected;
  for (const ScalarType& dtype : allowed)
    expected += (expected.empty() ? "" : &dtype + 1 == allowed.end() ? " or " : ", ") + to_text(dtype);
  op.refuse(argument, expected, to_text(got));
}

void expect_same_dtype(const Op& op, const char* argument, const Tensor& t, const char* other_name,
                       const Tensor& other) {
  if (t.scalar_type() != other.scalar_type())
    op.refuse(argument, to_text(other.scalar_type()) + ", as " + other_name + " has", to_text(t.scalar_type()));
}

void expect_unit_last_stride(const Op& op, const char* argument, const Tensor& t) {
  if (t.dim() == 0 || t.numel() == 0 || t.size(t.dim() - 1) == 1 || t.stride(t.dim() - 1) == 1) return;
  op.refuse(argument, "a last dimension of stride 1", strides_text(t));
}

void expect_contiguous(const Op& op, const char* argument, const Tensor& t) {
  if (!t.is_contiguous()) op.refuse(argument, "a contiguous tensor", strides_text(t));
}

Dtype expect_float_dtype(const Op& op, const char* argument, const Tensor& t, bool allow_float32) {
  if (allow_float32)
    expect_dtype(op, argument, t, {ScalarType::Half, ScalarType::BFloat16, ScalarType::Float});
  else
    expect_dtype(op, argument, t, {ScalarType::Half, ScalarType::BFloat16});
  switch (t.scalar_type()) {
    case ScalarType::Half: return Dtype::kFloat16;
    case ScalarType::BFloat16: return Dtype::kBfloat16;
    default: return Dtype::kFloat32;
  }
}

void expect_head_dim(const Op& op, const char* argument, int64_t head_dim) {
  if (head_dim < 8 || head_dim > 256 || head_dim % 8 != 0)
    op.refuse(argument, "a head_dim that is a multiple of 8 from 8 to 256", "head_dim " + std::to_string(head_dim));
}

void expect_tbq4_head_dim(const Op& op, const char* argument, int64_t head_dim) {
  if (head_dim != 64 && head_dim != 128 && head_dim != 256)
    op.refuse(argument, "a head_dim of 64, 128 or 256 (TBQ4)", "head_dim " + std::to_string(head_dim));
}

void expect_head_groups(const Op& op, int64_t q_heads, const char* kv_argument, int64_t kv_heads) {
  if (kv_heads < 1) op.refuse(kv_argument, "at least one KV head", std::to_string(kv_heads));
  if (q_heads < 1 || q_heads % kv_heads != 0)
    op.refuse("q", "a number of heads that is a multiple of the " + std::to_string(kv_heads) + " KV heads",
              std::to_string(q_heads) + " heads");
}

void expect_at_least(const Op& op, const char* argument, int64_t value, int64_t least) {
  if (value < least) op.refuse(argument, "at least " + std::to_string(least), std::to_string(value));
}

IndexView index_view(const Op& op, const char* argument, const Tensor& t, Shape shape, const char* other_name,
                     const Tensor& other) {
  expect_dtype(op, argument, t, {ScalarType::Int, ScalarType::Long});
  expect_same_device(op, argument, t, other_name, other);
  expect_shape(op, argument, t, shape);
  static constexpr int64_t kNothing = 0;
  const void* data = t.const_data_ptr();
  if (!data) data = &kNothing;  // a table of no columns is given, and has no room for any token
  return {data, {t.stride(0), t.dim() > 1 ? t.stride(1) : 0}, t.scalar_type() == ScalarType::Long};
}

}  // namespace flashq
