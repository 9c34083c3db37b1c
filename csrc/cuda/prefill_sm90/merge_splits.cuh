// The splits of each row, merged in their order.
#pragma once
#include "cuda/decode/finish.cuh"
#include "cuda/ptx/dependent_launch.cuh"

namespace flashq::cuda::sm90 {

inline constexpr int kMergeWarps = 4;

// A warp a row of (token, head). A partial whose lse is -inf counts only where all are: then its O is 0, or the NaN of
// visible keys that all score -inf.
static __global__ void __launch_bounds__(32 * kMergeWarps)
    merge_splits(const __grid_constant__ QueryView q, const float* outs, const float* lses, int splits) {
  ptx::wait_for_primary();
  const int64_t row = int64_t{blockIdx.x} * kMergeWarps + threadIdx.x / 32, rows = q.total_tokens * q.q_heads;
  if (row >= rows) return;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  SoftmaxState<Natural> all;
  int counting = 0;
  for (int k = 0; k < splits; ++k) {
    const float lse = lses[k * rows + row];
    merge(all, SoftmaxState<Natural>{lse, lse == -kInf ? 0.f : 1.f});
    counting += lse != -kInf;
  }
  const Quotient at = divide(row, q.q_heads);
  const Quotient place = q.cu_seqlens_q.given() ? Quotient{0, at.quotient} : divide(at.quotient, q.q_len);
  const float lse = all.lse();
  if (lane == 0) q.lse[lse_offset(q, place.quotient, place.remainder, at.remainder)] = lse;
  const int64_t out = out_offset(q, place.quotient, place.remainder, at.remainder);
  for (int64_t d = lane * 4; d < q.head_dim; d += 128) {
    float4 sum{-0.f, -0.f, -0.f, -0.f};  // + -0 is -0
    for (int k = 0; k < splits; ++k) {
      const float partial = lses[k * rows + row];
      if (partial == -kInf && counting > 0) continue;
      // Not exp(partial - lse): far from 0 lse is rounded so coarsely that such weights do not sum to 1.
      const float weight = counting > 1 ? merge_weight(SoftmaxState<Natural>{partial, 1}, all.max) / all.sum : 1;
      const auto o = load<float4>(outs + (k * rows + row) * q.head_dim + d);
      sum = {fmaf(weight, o.x, sum.x), fmaf(weight, o.y, sum.y), fmaf(weight, o.z, sum.z), fmaf(weight, o.w, sum.w)};
    }
    store_values(q, out, d, sum);
  }
}

}  // namespace flashq::cuda::sm90
