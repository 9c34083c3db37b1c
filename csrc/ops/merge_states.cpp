#include "ops/launch.h"
#include "ops/ops.h"

namespace flashq {
namespace {

using torch::headeronly::IntHeaderOnlyArrayRef;

// outs and lses with a batch dimension in front of the tokens: (K,T,H,D) is the case of one sequence.
MergeParams view_partials(const Tensor& outs, const Tensor& lses, Dtype dtype) {
  const int64_t rank = outs.dim(), tokens = rank - 3;
  const bool batched = rank == 5;
  return {.outs = outs.const_data_ptr(),
          .lses = static_cast<const float*>(lses.const_data_ptr()),
          .outs_stride = {outs.stride(0), batched ? outs.stride(1) : 0, outs.stride(tokens), outs.stride(tokens + 1)},
          .lses_stride = {lses.stride(0), batched ? lses.stride(1) : 0, lses.stride(tokens), lses.stride(tokens + 1)},
          .dtype = dtype,
          .partials = outs.size(0),
          .batch = batched ? outs.size(1) : 1,
          .tokens = outs.size(tokens),
          .heads = outs.size(tokens + 1),
          .head_dim = outs.size(rank - 1),
          .out = nullptr,
          .lse = nullptr};
}

IntHeaderOnlyArrayRef without_partials(const Tensor& t) { return {t.sizes().data() + 1, t.sizes().size() - 1}; }

}  // namespace

std::tuple<Tensor, Tensor> merge_states(const Tensor& outs, const Tensor& lses) {
  constexpr Op op("merge_states");
  expect_given(op, {{"outs", outs}, {"lses", lses}});
  const Dtype dtype = expect_float_dtype(op, "outs", outs, true);
  if (outs.dim() != 4 && outs.dim() != 5)
    op.refuse("outs", "shape (K, B, S, H, D) or (K, T, H, D)", "shape " + shape_of(outs));
  expect_unit_last_stride(op, "outs", outs);
  expect_dtype(op, "lses", lses, {ScalarType::Float});
  expect_same_device(op, "lses", lses, "outs", outs);
  if (outs.dim() == 5)
    expect_shape(op, "lses", lses,
                 {{"K", outs.size(0)}, {"B", outs.size(1)}, {"H", outs.size(3)}, {"S", outs.size(2)}});
  else
    expect_shape(op, "lses", lses, {{"K", outs.size(0)}, {"H", outs.size(2)}, {"T", outs.size(1)}});

  const Call call(op, outs);
  Tensor out = call.empty(without_partials(outs), outs.scalar_type());
  Tensor lse = call.empty(without_partials(lses), ScalarType::Float);
  MergeParams params = view_partials(outs, lses, dtype);
  params.out = out.mutable_data_ptr();
  params.lse = static_cast<float*>(lse.mutable_data_ptr());
  call.run(&Backend::merge_states, params);
  return {out, lse};
}

}  // namespace flashq
