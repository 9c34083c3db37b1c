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
  static constexpr bool kAlwaysFits = true;
  float scale_log2;
  __device__ __forceinline__ void exponents(float a, float b, float offset, int, float& to_a, float& to_b) const {
    to_a = fmaf(a, scale_log2, -offset);
    to_b = fmaf(b, scale_log2, -offset);
  }
  __device__ __forceinline__ void follow(float) {}
  __device__ __forceinline__ bool fits(int) const { return true; }
};
// Where all scores are far below the cap: on the FMA pipe, because the special function unit has its exponentials to
// do.
struct HardlyCapped {
  static constexpr bool kAlwaysFits = false;
  float factor[2], largest_square;
  int largest[2] = {0, 0};  // bits of the largest square
  __device__ __forceinline__ explicit HardlyCapped(const Cap& cap)
      : factor{cap.exponent_factor[0], cap.exponent_factor[1]}, largest_square(cap.largest_square) {}
  __device__ __forceinline__ void exponents(float a, float b, float offset, int h, float& to_a, float& to_b) {
    const float aa = a * a, bb = b * b;
    largest[h] = __vimax3_s32(largest[h], __float_as_int(aa), __float_as_int(bb));
    to_a = fmaf(a, fmaf(factor[1], aa, factor[0]), -offset);
    to_b = fmaf(b, fmaf(factor[1], bb, factor[0]), -offset);
  }
  // What comes next waits for this exponential. Else the compiler has all exponents worked out ahead of most
  // exponentials, and each pipe idles while the other one is busy (3 to 4 %).
  __device__ __forceinline__ void follow(float exponential) { factor[0] = fmaf(exponential, 0.f, factor[0]); }
  __device__ __forceinline__ bool fits(int h) const { return __int_as_float(largest[h]) <= largest_square; }
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

// P = exp2(exponents(s)), and its sums. The first kAhead scores are weighed before then(), which waits for the product
// that reads the last P. In between, if suspect(), and leave(), the rest is left out. Returns whether it was not.
template <class Element, int kAhead, int kCount, class Rule>
__device__ __forceinline__ bool exponentiate(const float (&s)[kCount], const float (&offset)[2], Rule& rule,
                                             Probabilities<kCount>& prob, float (&sum)[2], const auto& suspect,
                                             const auto& leave, const auto& then) {
  constexpr int kChunk = 8;
  float first[kCount / kChunk] = {};  // exponentials of the chunks
  sum[0] = sum[1] = 0;
  const auto weigh_pair = [&](int i) {
    const int h = i / 2 % 2;
    if (i % kChunk == 0 && i >= 2 * kChunk) rule.follow(first[i / kChunk - 2]);
    float a, b;
    rule.exponents(s[i], s[i + 1], offset[h], h, a, b);
    a = ptx::exp2_approx(a);
    b = ptx::exp2_approx(b);
    if (i % kChunk == 0) first[i / kChunk] = a;
    sum[h] += a + b;  // of two, because they have one wait
    return ptx::pack<Element>(a, b);
  };
  uint32_t ahead[kAhead / 2 + 1];
  if constexpr (kAhead > 0) {
#pragma unroll
    for (int i = 0; i < kAhead; i += 2) ahead[i / 2] = weigh_pair(i);
    // A way out, which the compiler cannot rule out, keeps it from writing P early.
    if (suspect()) {
      if (leave()) {  // one && would become a value
        then();
        return false;
      }
    }
  }
  then();
#pragma unroll
  for (int i = 0; i < kCount; i += 2) prob[i / 8][i / 2 % 4] = i < kAhead ? ahead[i / 2] : weigh_pair(i);
  return true;
}

// References follow the rows' maxima only where that is needed, so O is seldom rescaled (5 %).
inline constexpr float kLazyGrowth = 8;     // in base 2: where maxima are at hand
inline constexpr float kMostSum = 1 << 12;  // of a thread's P of a row in a tile, where they are not; fp16 holds it

// Without maxima: P against the references as they are. Right unless a row's P is too large, or it has no reference
// yet, or the rule does not fit; `bad` names those rows, but for the ignored(h). Returns whether there are none in the
// warp; if there are, nothing but P has changed, and of kAhead scores `bad` may be unknown.
template <class Element, int kAhead, int kCount, class Rule>
__device__ __forceinline__ bool softmax_alike(const float (&s)[kCount], RowState& rows, float scale_log2, Rule rule,
                                              Probabilities<kCount>& prob, bool (&bad)[2], const auto& ignored,
                                              const auto& then) {
  const float offset[2] = {rows.max[0] * scale_log2, rows.max[1] * scale_log2};
  float sum[2];
  const auto suspect = [&] {
    return __any_sync(~0u,
                      Rule::kAlwaysFits ? (offset[0] == -kInf) | (offset[1] == -kInf) : !rule.fits(0) | !rule.fits(1));
  };
  const auto leave = [&] {
    return Rule::kAlwaysFits || __any_sync(~0u, (!rule.fits(0) & !ignored(0)) | (!rule.fits(1) & !ignored(1)));
  };
  if (!exponentiate<Element, kAhead>(s, offset, rule, prob, sum, suspect, leave, then)) return false;
#pragma unroll
  for (int h = 0; h < 2; ++h) bad[h] = !(sum[h] <= kMostSum) | (offset[h] == -kInf) | !rule.fits(h);
  if (__any_sync(~0u, bad[0] | bad[1])) {
    if constexpr (Rule::kAlwaysFits) return false;
    if (__any_sync(~0u, (bad[0] & !ignored(0)) | (bad[1] & !ignored(1)))) return false;
  }
  for (int h = 0; h < 2; ++h) rows.sum[h] += sum[h];
  return true;
}

// With maxima. kMayBeEmpty: a row may have seen no key yet. moves(h, largest): whether the reference of row h should
// follow. rescale(factors): of O, which fits the references.
template <class Element, bool kMayBeEmpty, int kCount>
__device__ __forceinline__ void softmax(const float (&s)[kCount], RowState& rows, float scale_log2,
                                        Probabilities<kCount>& prob, const auto& moves, const auto& then,
                                        const auto& rescale) {
  float largest[2], offset[2], sum[2], o_scale[2];
  find_largest(s, rows, largest);
  const bool up[2] = {moves(0, largest[0]), moves(1, largest[1])};
  const bool grew = __any_sync(~0u, up[0] | up[1]);
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const float reference = up[h] ? largest[h] : rows.max[h];
    offset[h] = kMayBeEmpty && reference == -kInf ? 0.f : reference * scale_log2;  // exp2 is 0
  }
  if (grew) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      o_scale[h] = up[h] ? ptx::exp2_approx((rows.max[h] - largest[h]) * scale_log2) : 1.f;
      rows.max[h] = up[h] ? largest[h] : rows.max[h];
      rows.sum[h] *= o_scale[h];
    }
  }
  Plain rule{scale_log2};
  const auto no = [] { return false; };
  exponentiate<Element, 0>(s, offset, rule, prob, sum, no, no, then);
  for (int h = 0; h < 2; ++h) rows.sum[h] += sum[h];
  if (grew) rescale(o_scale);
}

}  // namespace flashq::cuda::sm90
