// The splits of each row, merged in their order.
#pragma once
#include "core/softmax_state.h"
#include "cuda/prefill_sm90/traits.cuh"
#include "cuda/ptx/dependent_launch.cuh"
#include "cuda/ptx/mma.cuh"
#include "cuda/vector.cuh"

namespace flashq::cuda::sm90 {

inline constexpr int kCombineWarps = 4;

// A warp a row of (batch, token, head). A partial whose lse is -inf counts only where all are: then its O is 0, or the
// NaN of visible keys that all score -inf.
template <class T> __global__ void __launch_bounds__(32 * kCombineWarps)
    combine_splits(const __grid_constant__ QueryView q, const float* outs, const float* lses, int splits) {
  ptx::wait_for_primary();
  const int64_t row = int64_t{blockIdx.x} * kCombineWarps + threadIdx.x / 32, rows = q.total_tokens * q.q_heads;
  if (row >= rows) return;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  SoftmaxState<Natural> all;
  for (int k = 0; k < splits; ++k)
    merge(all, SoftmaxState<Natural>{lses[k * rows + row], lses[k * rows + row] == -kInf ? 0.f : 1.f});
  const Quotient at = divide(row, q.q_heads), place = divide(at.quotient, q.q_len);  // batch and token
  const float lse = all.lse();
  if (lane == 0)
    q.lse[place.quotient * q.lse_stride[0] + at.remainder * q.lse_stride[1] + place.remainder * q.lse_stride[2]] = lse;
  auto* out = static_cast<uint16_t*>(q.out) + place.quotient * q.out_stride[0] + place.remainder * q.out_stride[1] +
              at.remainder * q.out_stride[2];
  for (int64_t d = lane * 2; d < q.head_dim; d += 64) {
    float2 sum{-0.f, -0.f};  // + -0 is -0
    for (int k = 0; k < splits; ++k) {
      const float partial = lses[k * rows + row];
      if (partial == -kInf && !all.empty()) continue;
      const float weight = all.empty() ? 1 : expf(partial - lse);
      const auto o = load<float2>(outs + (k * rows + row) * q.head_dim + d);
      sum.x += weight * o.x;
      sum.y += weight * o.y;
    }
    store(out + d, Vector<uint32_t, 1>{ptx::pack<T>(sum.x, sum.y)});
  }
}

}  // namespace flashq::cuda::sm90
