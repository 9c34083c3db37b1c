// An op that does nothing, with the schema and the name of one of flashq's (EMPTY_OP_SCHEMA): what torch itself takes
// for such a call.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#include <optional>
#include <tuple>

namespace {

using torch::stable::Tensor;
using OptionalTensor = std::optional<Tensor>;

std::tuple<Tensor, Tensor> decode(const Tensor& q, const Tensor&, const Tensor&, const Tensor&, const OptionalTensor&,
                                  const OptionalTensor&, const OptionalTensor&, const OptionalTensor&, int64_t,
                                  std::optional<double>, bool, int64_t, double, int64_t,
                                  std::optional<torch::headeronly::ScalarType>) {
  return {q, q};
}

}  // namespace

STABLE_TORCH_LIBRARY(flashq_empty, m) { m.def(EMPTY_OP_SCHEMA); }
STABLE_TORCH_LIBRARY_IMPL(flashq_empty, CUDA, m) { m.impl("decode", TORCH_BOX(&decode)); }
STABLE_TORCH_LIBRARY_IMPL(flashq_empty, CPU, m) { m.impl("decode", TORCH_BOX(&decode)); }
