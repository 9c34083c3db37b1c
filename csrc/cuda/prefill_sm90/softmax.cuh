// The online softmax of one thread's two rows (h = 0: lane / 4, h = 1: 8 further; see ptx/wgmma.cuh for the layout).
#pragma once
#include "cuda/prefill_sm90/schedule.cuh"
#include "cuda/ptx/math.cuh"
#include "cuda/ptx/mma.cuh"
#include "cuda/score_mask.cuh"

namespace flashq::cuda::sm90 {

// The first of a thread's rows, of the 64 of its warpgroup. Of an unsigned number it takes fewer instructions.
template <class Thread> __device__ __forceinline__ int row_of_thread(Thread thread) {
  return static_cast<int>(thread % 128 / 32 * 16 + thread % 32 / 4);
}

// `max` is the reference that exponents are taken against, of scores before scale_log2; it may stay behind the true
// maximum, see softmax(). `sum` is this thread's part.
struct RowState { float max[2], sum[2]; };

// Exponents of 2, of two scores of row h: value * scale_log2 - offset. fits(h): whether that held for all of them.
struct Plain {
  static constexpr int kAhead = 0;  // a multiply-add each, which hides behind the exponentials
  float scale_log2;
  __device__ __forceinline__ void exponents(float a, float b, float offset, int, float& to_a, float& to_b) const {
    to_a = fmaf(a, scale_log2, -offset);
    to_b = fmaf(b, scale_log2, -offset);
  }
  __device__ __forceinline__ bool fits(int) const { return true; }
};
// Where all scores are far below the cap: on the FMA pipe, because the special function unit has its exponentials to
// do.
struct HardlyCapped {
  // A quarter of them, while O is under way (D 128: 7 %; half of them spill registers and lose 8 %).
  static constexpr int kAhead = 16;
  const Cap& cap;
  int largest[2] = {0, 0};  // bits of the largest square
  __device__ __forceinline__ void exponents(float a, float b, float offset, int h, float& to_a, float& to_b) {
    const float aa = a * a, bb = b * b;
    largest[h] = __vimax3_s32(largest[h], __float_as_int(aa), __float_as_int(bb));
    to_a = fmaf(a, fmaf(cap.exponent_factor[1], aa, cap.exponent_factor[0]), -offset);
    to_b = fmaf(b, fmaf(cap.exponent_factor[1], bb, cap.exponent_factor[0]), -offset);
  }
  __device__ __forceinline__ bool fits(int h) const { return __int_as_float(largest[h]) <= cap.largest_square; }
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

// Largest score of a row in this tile, by integer reductions of three, half as many instructions as fmaxf. kPositive:
// signed maximum of the bits, right unless all are negative; then the result is negative too, but wrong. Else: unsigned
// minimum of the bits, right if all are negative.
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

// P, a thread's part: pairs of columns in 16 bits, as the operand of a product (ptx/wgmma.cuh).
template <int kCount> using Probabilities = uint32_t[kCount / 8][4];

// P = exp2(exponents(s)), and its sums. then() comes before P is written, and after the exponents of the first
// Rule::kAhead scores: if stray() says after these that the rule does not fit, the rest is left out. Returns whether
// it was not.
template <class Element, int kCount, class Rule>
__device__ __forceinline__ bool exponentiate(const float (&s)[kCount], const float (&offset)[2], Rule& rule,
                                             Probabilities<kCount>& prob, float (&sum)[2], const auto& stray,
                                             const auto& then) {
  constexpr int kAhead = Rule::kAhead;
  float e[kCount];
  const auto find_exponents = [&](int i) {
    const int h = i / 2 % 2;
    rule.exponents(s[i], s[i + 1], offset[h], h, e[i], e[i + 1]);
  };
  if constexpr (kAhead > 0) {
#pragma unroll
    for (int i = 0; i < kAhead; i += 2) find_exponents(i);
#pragma unroll
    for (int i = 0; i < kAhead; ++i) asm volatile("" : "+f"(e[i])::"memory");
    if (__any_sync(~0u, stray())) {  // and so the code before it stays there
      then();
      return false;
    }
  }
  then();
  float part[4] = {};
#pragma unroll
  for (int i = 0; i < kCount; i += 2) {
    const int h = i / 2 % 2;
    if (i >= kAhead) find_exponents(i);
    const float a = ptx::exp2_approx(e[i]), b = ptx::exp2_approx(e[i + 1]);
    part[2 * h] += a;
    part[2 * h + 1] += b;
    prob[i / 8][i / 2 % 4] = ptx::pack<Element>(a, b);
  }
  sum[0] = part[0] + part[1];
  sum[1] = part[2] + part[3];
  return true;
}

// References follow the rows' maxima only where that is needed, so O is seldom rescaled (5 %).
inline constexpr float kLazyGrowth = 8;     // in base 2: where maxima are at hand
inline constexpr float kMostSum = 1 << 12;  // of a thread's P of a row in a tile, where they are not; fp16 holds it

// Without maxima: P against the references as they are. Right unless a row's P is too large, or it has no reference
// yet, or the rule does not fit; `bad` names those rows, and says of all but them. Returns whether there are none in
// the warp; if there are, nothing but P has changed.
template <class Element, int kCount, class Rule>
__device__ __forceinline__ bool softmax_alike(const float (&s)[kCount], RowState& rows, float scale_log2, Rule rule,
                                              Probabilities<kCount>& prob, bool (&bad)[2], const auto& ignored,
                                              const auto& then) {
  const float offset[2] = {rows.max[0] * scale_log2, rows.max[1] * scale_log2};
  float sum[2];
  const auto strays = [&](int h) { return !rule.fits(h) & !ignored(h); };
  if (!exponentiate<Element>(s, offset, rule, prob, sum, [&] { return strays(0) | strays(1); }, then)) return false;
#pragma unroll
  for (int h = 0; h < 2; ++h) bad[h] = (((sum[h] > kMostSum) | (offset[h] == -kInf)) & !ignored(h)) | strays(h);
  if (__any_sync(~0u, bad[0] | bad[1])) return false;
  for (int h = 0; h < 2; ++h) rows.sum[h] += sum[h];
  return true;
}

// With maxima. kMayBeEmpty: a row may have seen no key yet. moves(h, largest): whether the reference of row h should
// follow. Returns whether O has to be multiplied by o_scale.
template <class Element, bool kMayBeEmpty, int kCount>
__device__ __forceinline__ bool softmax(const float (&s)[kCount], RowState& rows, float (&o_scale)[2], float scale_log2,
                                        Probabilities<kCount>& prob, const auto& moves, const auto& then) {
  float largest[2], offset[2], sum[2];
  find_largest(s, rows, largest);
  bool grew = false;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const bool up = moves(h, largest[h]);
    o_scale[h] = up ? ptx::exp2_approx((rows.max[h] - largest[h]) * scale_log2) : 1.f;
    rows.max[h] = up ? largest[h] : rows.max[h];
    grew |= up;
    offset[h] = kMayBeEmpty && rows.max[h] == -kInf ? 0.f : rows.max[h] * scale_log2;  // exp2 is 0
  }
  Plain rule{scale_log2};
  exponentiate<Element>(s, offset, rule, prob, sum, [] { return false; }, then);
  for (int h = 0; h < 2; ++h) rows.sum[h] = rows.sum[h] * o_scale[h] + sum[h];
  return __any_sync(~0u, grew);
}

}  // namespace flashq::cuda::sm90
