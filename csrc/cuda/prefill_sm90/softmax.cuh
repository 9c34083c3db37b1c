// The online softmax of one thread's two rows (h = 0: lane / 4, h = 1: 8 further; see ptx/wgmma.cuh for the layout).
#pragma once
#include "cuda/prefill_sm90/schedule.cuh"
#include "cuda/ptx/math.cuh"
#include "cuda/score_mask.cuh"

namespace flashq::cuda::sm90 {

// The first of a thread's rows, of the 64 of its warpgroup.
__device__ __forceinline__ int row_of_thread(int thread) { return thread % 128 / 32 * 16 + thread % 32 / 4; }

// `max` is the reference that exponents are taken against, of scores before scale_log2; it may stay behind the true
// maximum, see softmax(). `sum` is this thread's part.
struct RowState { float max[2], sum[2]; };

// Whether s >= -limit for all scores of row h that this thread has; not if one is a negative NaN.
template <int kCount> __device__ __forceinline__ bool above(const float (&s)[kCount], int h, float limit) {
  unsigned lowest = 0;  // the bits of a negative number are larger than those of any positive one
#pragma unroll
  for (int i = 2 * h; i < kCount; i += 4)
    lowest = __vimax3_u32(lowest, __float_as_uint(s[i]), __float_as_uint(s[i + 1]));
  return fabsf(__uint_as_float(lowest)) <= limit || static_cast<int>(lowest) >= 0;
}

// From scores to exponents of 2: value() before scale_log2, which does not fall, and exponent() = value * scale_log2 -
// offset.
struct Plain {
  float scale_log2;
  __device__ __forceinline__ float value(float x) const { return x; }
  __device__ __forceinline__ float exponent(float x, float offset) const { return fmaf(x, scale_log2, -offset); }
};
// Where all scores are far below the cap: on the FMA pipe, because the special function unit has its exponentials to
// do.
struct HardlyCapped {
  const Cap& cap;
  __device__ __forceinline__ float value(float x) const { return x * fmaf(cap.factor[1], x * x, cap.factor[0]); }
  __device__ __forceinline__ float exponent(float x, float offset) const {
    return fmaf(x, fmaf(cap.exponent_factor[1], x * x, cap.exponent_factor[0]), -offset);
  }
};

// Of SharedMemory::missing, 16 keys a bit.
__device__ __forceinline__ uint32_t columns_missing(uint32_t missing) {
  uint32_t columns = 0;
#pragma unroll
  for (int i = 0; i < 8; ++i) columns |= (missing >> i & 1) * (0xfu << 4 * i);
  return columns;
}

// Scores of the columns of row h that are not visible become -inf.
template <int kCount> __device__ __forceinline__ void mask_row(float (&s)[kCount], int h, uint32_t visible) {
  mask_scores<kCount / 2>(visible, [&](int i) -> float& { return s[4 * (i / 2) + 2 * h + i % 2]; });
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

// The largest score of each row of this tile. Where all are negative it may be a wrong negative number, unless the row
// has seen nothing above zero: then it matters.
template <int kCount>
__device__ __forceinline__ void find_largest(const float (&s)[kCount], const RowState& rows, float (&largest)[2]) {
  largest[0] = reduce_bits<true>(s, 0);
  largest[1] = reduce_bits<true>(s, 1);
  if (__any_sync(~0u, (largest[0] < 0 && rows.max[0] < 0) || (largest[1] < 0 && rows.max[1] < 0))) {
    const float negative[2] = {reduce_bits<false>(s, 0), reduce_bits<false>(s, 1)};
    for (int h = 0; h < 2; ++h)
      if (largest[h] < 0) largest[h] = negative[h];
  }
}

// s -> exp2((value(s) - max) * scale_log2) in place. kMayBeEmpty: a row may have seen no key yet. Returns whether O has
// to be multiplied by o_scale.
template <bool kMayBeEmpty, int kCount, class Rule>
__device__ __forceinline__ bool softmax(float (&s)[kCount], RowState& rows, const float (&largest)[2],
                                        float (&o_scale)[2], float scale_log2, Rule rule) {
  bool grew = false;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const float value = rule.value(largest[h]);
    // Lazy: the reference moves only when exp2 would exceed 2^8, which fp16 still holds, so O is seldom rescaled (5 %).
    // The first finite score always sets it. False while both are -inf.
    const bool up = value * scale_log2 > rows.max[h] * scale_log2 + 8.f;
    o_scale[h] = up ? ptx::exp2_approx((rows.max[h] - value) * scale_log2) : 1.f;
    rows.max[h] = up ? value : rows.max[h];
    rows.sum[h] *= o_scale[h];
    grew |= up;
  }
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const float offset = kMayBeEmpty && rows.max[h] == -kInf ? 0.f : rows.max[h] * scale_log2;  // exp2 is 0
    float even = 0, odd = 0;
#pragma unroll
    for (int i = 2 * h; i < kCount; i += 4) {
      s[i] = ptx::exp2_approx(rule.exponent(s[i], offset));
      s[i + 1] = ptx::exp2_approx(rule.exponent(s[i + 1], offset));
      even += s[i];
      odd += s[i + 1];
    }
    rows.sum[h] += even + odd;
  }
  return __any_sync(~0u, grew);
}

}  // namespace flashq::cuda::sm90
