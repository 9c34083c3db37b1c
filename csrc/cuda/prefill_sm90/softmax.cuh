// The online softmax of one thread's two rows (h = 0: lane / 4, h = 1: 8 further; see ptx/wgmma.cuh for the layout).
#pragma once
#include "cuda/prefill_sm90/schedule.cuh"
#include "cuda/ptx/math.cuh"
#include "cuda/score_mask.cuh"

namespace flashq::cuda::sm90 {

// `max` is the reference that exponents are taken against, of scores before scale_log2; it may stay behind the true
// maximum, see softmax(). `sum` is this thread's part.
struct RowState { float max[2], sum[2]; };

// Whether |s| <= limit for all scores of row h that this thread has; not if one is NaN.
template <int kCount> __device__ __forceinline__ bool within(const float (&s)[kCount], int h, float limit) {
  int largest = 0;
  unsigned lowest = 0;  // the bits of a negative number are larger than those of any positive one
#pragma unroll
  for (int i = 2 * h; i < kCount; i += 4) {
    largest = __vimax3_s32(largest, __float_as_int(s[i]), __float_as_int(s[i + 1]));
    lowest = __vimax3_u32(lowest, __float_as_uint(s[i]), __float_as_uint(s[i + 1]));
  }
  return __int_as_float(largest) <= limit && fabsf(__uint_as_float(lowest)) <= limit;
}

// s -> tanh(multiplier * s). Where scores are far below the cap (`small`, of a whole warp), by a polynomial on the FMA
// pipe, off by 2.3e-5 relative: the exponentials need the special function unit for themselves.
template <int kCount> __device__ __forceinline__ void cap_scores(float (&s)[kCount], const Cap& cap, bool small) {
  if (small) {
#pragma unroll
    for (float& x : s) {
      const float square = x * x;
      x *= fmaf(fmaf(cap.factor[2], square, cap.factor[1]), square, cap.factor[0]);
    }
  } else {
#pragma unroll
    for (float& x : s) x = ptx::tanh_approx(x * cap.multiplier);
  }
}

// Largest score of a row in this tile, by integer reductions of three, half as many instructions as fmaxf (2-4 % of the
// whole kernel). kPositive: signed maximum of the bits, right unless all are negative; then the result is negative too,
// but wrong. Else: unsigned minimum of the bits, right if all are negative.
template <bool kPositive, int kCount> __device__ __forceinline__ float reduce_bits(const float (&s)[kCount], int h) {
  const auto three = [](int a, int b, int c) {
    return kPositive ? __vimax3_s32(a, b, c) : static_cast<int>(__vimin3_u32(a, b, c));
  };
  int even = __float_as_int(s[2 * h]), odd = __float_as_int(s[2 * h + 1]);
#pragma unroll
  for (int i = 4 + 2 * h; i < kCount; i += 8) {
    even = three(even, __float_as_int(s[i]), __float_as_int(s[i + 1]));
    if (i + 4 < kCount) odd = three(odd, __float_as_int(s[i + 4]), __float_as_int(s[i + 5]));
  }
  float largest = __int_as_float(three(even, odd, odd));
  largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 1));  // four lanes share a row
  return fmaxf(largest, __shfl_xor_sync(~0u, largest, 2));
}

// s -> exp2((s - max) * scale_log2) in place. Returns whether O has to be multiplied by o_scale.
template <bool kMasked, int kCount>
__device__ __forceinline__ bool softmax(float (&s)[kCount], RowState& rows, float (&o_scale)[2], float scale_log2) {
  float largest[2] = {reduce_bits<true>(s, 0), reduce_bits<true>(s, 1)};
  // All negative: the true maximum matters only to a row that has seen nothing above zero.
  if (__any_sync(~0u, (largest[0] < 0 && rows.max[0] < 0) || (largest[1] < 0 && rows.max[1] < 0))) {
    const float negative[2] = {reduce_bits<false>(s, 0), reduce_bits<false>(s, 1)};
    for (int h = 0; h < 2; ++h)
      if (largest[h] < 0) largest[h] = negative[h];
  }
  bool grew = false;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    // Lazy: the reference moves only when exp2 would exceed 2^8, which fp16 still holds, so O is seldom rescaled (5 %).
    // The first finite score always sets it. False while both are -inf.
    const bool up = largest[h] * scale_log2 > rows.max[h] * scale_log2 + 8.f;
    o_scale[h] = up ? ptx::exp2_approx((rows.max[h] - largest[h]) * scale_log2) : 1.f;
    rows.max[h] = up ? largest[h] : rows.max[h];
    rows.sum[h] *= o_scale[h];
    grew |= up;
  }
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const float offset =
        kMasked && rows.max[h] == -kInf ? 0.f : rows.max[h] * scale_log2;  // no key seen yet: exp2 is 0
    float even = 0, odd = 0;
#pragma unroll
    for (int i = 2 * h; i < kCount; i += 4) {
      s[i] = ptx::exp2_approx(fmaf(s[i], scale_log2, -offset));
      s[i + 1] = ptx::exp2_approx(fmaf(s[i + 1], scale_log2, -offset));
      even += s[i];
      odd += s[i + 1];
    }
    rows.sum[h] += even + odd;
  }
  return __any_sync(~0u, grew);
}

}  // namespace flashq::cuda::sm90
