// Argument checks of the ops. Every refusal reads "flashq::op: argument: expected ..., got ...".
#pragma once
#include <torch/csrc/stable/tensor.h>

#include <initializer_list>
#include <optional>
#include <string>
#include <string_view>

#include "params.h"

namespace flashq {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using OptionalTensor = std::optional<Tensor>;

class Op {
 public:
  explicit constexpr Op(const char* name) : name_(name) {}

  [[noreturn]] void refuse(std::string_view argument, std::string_view expected, std::string_view got) const;
  // What a backend returned: its message, with the op's name in front.
  [[noreturn]] void fail(std::string_view message) const;

 private:
  const char* name_;
};

[[nodiscard]] std::string to_text(ScalarType dtype);   // "torch.float32"
[[nodiscard]] std::string to_text(double value);       // "1e-50"
[[nodiscard]] std::string shape_of(const Tensor& t);   // "(2, 3)"
[[nodiscard]] std::string device_of(const Tensor& t);  // "cuda:0"

// One dimension of an expected shape: its name in the message, and its size where that is fixed.
inline constexpr int64_t kAny = -1;
struct Dim {
  const char* name;
  int64_t size = kAny;
};
using Shape = std::initializer_list<Dim>;

// torch's schemas let None pass for a tensor that is not optional; nothing else may be asked of that one.
struct NamedTensor {
  const char* name;
  const Tensor& tensor;
};
void expect_given(const Op& op, std::initializer_list<NamedTensor> tensors);

void expect_shape(const Op& op, const char* argument, const Tensor& t, Shape shape);
void expect_same_device(const Op& op, const char* argument, const Tensor& t, const char* other_name,
                        const Tensor& other);
void expect_dtype(const Op& op, const char* argument, const Tensor& t, std::initializer_list<ScalarType> allowed);
void expect_same_dtype(const Op& op, const char* argument, const Tensor& t, const char* other_name,
                       const Tensor& other);
void expect_unit_last_stride(const Op& op, const char* argument, const Tensor& t);
void expect_contiguous(const Op& op, const char* argument, const Tensor& t);

// fp16 or bf16; fp32 too where `allow_float32`.
[[nodiscard]] Dtype expect_float_dtype(const Op& op, const char* argument, const Tensor& t, bool allow_float32);
// A multiple of 8 from 8 to 256, or 64, 128, 256 for TBQ4. `argument` is the tensor that brought it.
void expect_head_dim(const Op& op, const char* argument, int64_t head_dim);
void expect_tbq4_head_dim(const Op& op, const char* argument, int64_t head_dim);
void expect_head_groups(const Op& op, int64_t q_heads, const char* kv_argument, int64_t kv_heads);
void expect_at_least(const Op& op, const char* argument, int64_t value, int64_t least);

// int32 or int64, on the other tensor's device, any strides.
[[nodiscard]] IndexView index_view(const Op& op, const char* argument, const Tensor& t, Shape shape,
                                   const char* other_name, const Tensor& other);

}  // namespace flashq
