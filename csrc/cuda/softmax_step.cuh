// Scores to weights, one tile of keys after the other, on the accumulator fragments of mma.sync (ptx/mma.cuh).
#pragma once
#include <cmath>
#include <limits>

#include "core/softmax_state.h"
#include "cuda/ptx/math.cuh"
#include "cuda/ptx/mma.cuh"
#include "cuda/score_mask.cuh"
#include "cuda/sequences.cuh"
#include "params.h"

namespace flashq::cuda {

// From q.k to a score in base 2. In the plain case, score = factor * q.k with factor > 0, kernels fold the factor into
// the exponential. Otherwise score = last * factor * q.k, or last * gain * tanh(shrink * factor * q.k). log2(e) is part
// of the factor or gain that comes last, one rounding less, unless their product overflows: then it is `last`. So is
// 1 / softcap part of the factor (shrink 1) unless their product leaves float32.
struct ScoreRule {
  float factor, shrink = 1, gain, last = 1;
  bool capped, plain;

  explicit ScoreRule(const ScoreOptions& o) : factor(o.scale), gain(o.softcap), capped(o.softcap != 0) {
    if (capped) {
      shrink = std::fmin(1 / o.softcap, std::numeric_limits<float>::max());  // not inf: 0 * inf is NaN
      if (const float quotient = o.scale / o.softcap; std::isnormal(quotient)) {
        factor = quotient;
        shrink = 1;
      }
    }
    float& outer = capped ? gain : factor;
    if (std::isfinite(outer * kLog2E))
      outer *= kLog2E;
    else
      last = kLog2E;
    plain = !capped && last == 1 && factor > 0 && std::isnormal(factor);
  }

  // q.k to scores, with the choices outside the loops.
  template <int kM, int kN> __device__ __forceinline__ void apply(float (&s)[kM][kN][4]) const {
    const auto for_each = [&](auto f) {
#pragma unroll
      for (int m = 0; m < kM; ++m)
#pragma unroll
        for (int n = 0; n < kN; ++n)
#pragma unroll
          for (int i = 0; i < 4; ++i) s[m][n][i] = f(s[m][n][i]);
    };
    if (plain)
      for_each([&](float x) { return x * factor; });
    else if (capped)
      for_each([&](float x) { return ptx::tanh_approx(x * factor * shrink) * gain * last; });
    else
      for_each([&](float x) { return x * factor * last; });
  }
};

// The running state of the rows that a lane has a part of: rows g and g + 8 of each of kM 16-row fragments. max is the
// same in the four lanes of a row, sum is each lane's own part.
template <int kM> struct RowStates {
  float max[kM][2], sum[kM][2];

  __device__ __forceinline__ RowStates() {
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        max[m][r] = -kInf;
        sum[m][r] = 0;
      }
  }
};

__device__ __forceinline__ float reduce_row_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
  return fmaxf(x, __shfl_xor_sync(~0u, x, 2));
}
__device__ __forceinline__ float reduce_row_sum(float x) {
  x += __shfl_xor_sync(~0u, x, 1);
  return x + __shfl_xor_sync(~0u, x, 2);
}

// Scores of row g + 8 r of a fragment (16, 8 kN): -inf for keys outside the range, or whose bit is not set.
template <int kN> __device__ __forceinline__ void mask_row(float (&s)[kN][4], int r, uint32_t visible) {
  mask_scores<2 * kN>(visible, [&](int i) -> float& { return s[i / 2][2 * r + i % 2]; });
}
template <int kN> __device__ __forceinline__ void mask_row(float (&s)[kN][4], int r, TileRange keys) {
  const int first = static_cast<int>(threadIdx.x) % 4 * 2;
  mask_row(s, r, columns_in(keys.begin - first, keys.end - first));
}
template <int kN> __device__ __forceinline__ void mask_row(float (&s)[kN][4], int r, const uint32_t (&bits)[kN / 4]) {
  uint32_t visible = 0;
#pragma unroll
  for (int n = 0; n < kN; ++n) visible |= (bits[n / 4] >> (n % 4 * 8 + threadIdx.x % 4 * 2) & 3) << 2 * n;
  mask_row(s, r, visible);
}

// By how much (in base 2) a maximum may grow before the accumulators are rescaled: weights up to 2^8 lose nothing in
// fp32 sums and fit fp16, and after the first few tiles a maximum hardly ever grows by more.
inline constexpr float kLazyGrowth = 8;

// The largest of a lane's scores of row r, by integer maxima of three, half as many instructions as fmaxf. Of bits:
// kPositive, where some score is not negative, else some negative number; otherwise where all are negative. May miss a
// NaN; the sum does not.
template <bool kPositive, int kN> __device__ __forceinline__ float largest_bits(const float (&s)[kN][4], int r) {
  float top = __uint_as_float(kPositive ? 1u << 31 : ~0u);
#pragma unroll
  for (int n = 0; n < kN; ++n)
    top =
        kPositive ? ptx::max_bits(top, s[n][2 * r], s[n][2 * r + 1]) : ptx::min_bits(top, s[n][2 * r], s[n][2 * r + 1]);
  return top;
}

// s (16 kM rows, 8 kN keys): q.k, or with factor 1 scores, -inf where masked. Raises the maxima where that is needed,
// and shrinks the sums and acc (16 kM, 8 kA) by as much.
template <int kM, int kN, int kA> __device__ __forceinline__ void raise_maxima(const float (&s)[kM][kN][4],
                                                                               float factor, RowStates<kM>& state,
                                                                               float (&acc)[kM][kA][4]) {
  // First without an exchange among the four lanes of a row.
  float top[kM][2];
  bool grow = false;
#pragma unroll
  for (int m = 0; m < kM; ++m)
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      top[m][r] = largest_bits<true>(s[m], r);
      const float most = state.max[m][r] + kLazyGrowth;  // the first finite score of a row is its maximum
      grow |= most < 0 || top[m][r] * factor > most;
    }
  if (!__any_sync(~0u, grow)) return;
#pragma unroll
  for (int m = 0; m < kM; ++m)
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float x = top[m][r];
      if (x <= 0) x = largest_bits<false>(s[m], r);
      x = reduce_row_max(x) * factor;
      const float max = fmaxf(state.max[m][r], x);
      const float shrink = ptx::exp2_approx(state.max[m][r] - (max == -kInf ? 0 : max));
      state.max[m][r] = max;
      state.sum[m][r] *= shrink;
#pragma unroll
      for (int a = 0; a < kA; ++a) {
        acc[m][a][2 * r] *= shrink;
        acc[m][a][2 * r + 1] *= shrink;
      }
    }
}

// The weights 2^(score - max) of 16 keys, from two fragments, as an A fragment of the product with the values; their
// sums go to `sum`.
template <class T> __device__ __forceinline__ void weigh(const float (&a)[4], const float (&b)[4], float factor,
                                                         const float (&max)[2], float (&sum)[2],
                                                         uint32_t (&weight)[4]) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const float base = max[r] == -kInf ? 0 : max[r];  // -inf alone so far: 2^(-inf - 0) = 0
    const auto power = [&](float x) { return ptx::exp2_approx(fmaf(x, factor, -base)); };
    const float p[4] = {power(a[2 * r]), power(a[2 * r + 1]), power(b[2 * r]), power(b[2 * r + 1])};
    sum[r] += (p[0] + p[1]) + (p[2] + p[3]);
    weight[r] = ptx::pack<T>(p[0], p[1]);
    weight[2 + r] = ptx::pack<T>(p[2], p[3]);
  }
}

}  // namespace flashq::cuda
