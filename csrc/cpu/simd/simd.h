// A thin SIMD layer: what the attention kernels need, once for each ISA level. A kernel file includes this header and
// is compiled once per level; -DFLASHQ_ISA names the namespace, so the copies never share a symbol.
//
// Everything is internal (unnamed namespace) and always inlined. That is not only for speed: a weak inline function
// emitted by the AVX-512 object could be the copy that the linker keeps for all levels.
//
// Vectors have kLanes 32-bit lanes: VecF of fp32, VecI of words. Functions ending in _n take the number of lanes that
// exist in memory, for the end of a row. Rows are multiples of 8 elements, so only 16-lane vectors ever need that; the
// narrower levels ignore the count.
#pragma once
#include <cstdint>
#include <cstring>

#include "core/portability.h"

#define FLASHQ_SIMD [[gnu::always_inline]] inline

namespace flashq::FLASHQ_ISA {
namespace {

struct Fp16 { uint16_t bits; };
struct Bf16 { uint16_t bits; };

constexpr int kTileK = 64;  // keys of a tile, in every kernel: the bits of a uint64_t mask

}  // namespace
}  // namespace flashq::FLASHQ_ISA

#if defined(__AVX512F__)
#include "cpu/simd/avx512.h"
#elif defined(__AVX2__)
#include "cpu/simd/avx2.h"
#else
#include "cpu/simd/portable.h"
#endif

namespace flashq::FLASHQ_ISA {
namespace {

FLASHQ_SIMD void prefetch_l2(const void* p) { __builtin_prefetch(p, 0, 2); }

// 2^r on [-1/2, 1/2]: 1 + r * polynomial, so that 2^0 is exactly 1. Minimax relative errors: degree 4 3e-6, enough
// for 16-bit values; degree 6 2e-9, that is 1 ulp after rounding.
template <int kDegree> constexpr float kExp2Poly[1] = {};
template <> constexpr float kExp2Poly<4>[4] = {9.582852945e-03f, 5.590642616e-02f, 2.402409911e-01f, 6.931241751e-01f};
template <> constexpr float kExp2Poly<6>[6] = {1.535336196e-04f, 1.339887502e-03f, 9.618436918e-03f,
                                               5.550332367e-02f, 2.402264774e-01f, 6.931471825e-01f};

// 2^t for t <= 126: exactly 1 for 0, exactly 0 for -inf, NaN for NaN. The clamp is what turns -inf into 0 (its
// remainder would be NaN); t is its second operand, because that one survives a NaN.
template <int kDegree> FLASHQ_SIMD VecF exp2(VecF t) {
  t = max(set1(kExp2Floor), t);
  const VecF n = round(t);
  const VecF r = sub(t, n);
  VecF p = set1(kExp2Poly<kDegree>[0]);
#pragma GCC unroll 8
  for (int i = 1; i < kDegree; ++i) p = fma(p, r, set1(kExp2Poly<kDegree>[i]));
  return scale_exp2(fma(p, r, set1(1.f)), n);
}

// A few ulp; +-inf gives +-1, NaN stays. Near 0 an odd polynomial (Cephes), else 1 - 2 / (e^2|x| + 1).
FLASHQ_SIMD VecF tanh(VecF x) {
  const VecF size = abs(x), z = mul(x, x);
  VecF p = set1(-5.70498872745e-3f);
  p = fma(p, z, set1(2.06390887954e-2f));
  p = fma(p, z, set1(-5.37397155531e-2f));
  p = fma(p, z, set1(1.33314422036e-1f));
  p = fma(p, z, set1(-3.33332819422e-1f));
  const VecF small = fma(mul(p, z), x, x);
  // 1 from 10 on; min keeps its second operand where one is NaN.
  const VecF e = exp2<6>(mul(min(set1(10.f), size), set1(2 * kLog2E)));
  const VecF large = sub(set1(1.f), div(set1(2.f), add(e, set1(1.f))));
  return select_less(size, set1(.625f), small, copy_sign(large, x));
}

// How a row of T becomes operands of a dot product. A "word" is 32 bits: one fp32 (wider types are made from fp16, and
// from bf16 where the ISA cannot multiply it), or two bf16.
struct WordsF32 {
  static constexpr int kPerWord = 1;
  FLASHQ_SIMD static VecF mac(VecF acc, VecF a, VecF b) { return fma(a, b, acc); }
  // Words [word, word + count) of a row.
  template <class T> FLASHQ_SIMD static VecI load_row_n(const T* row, int64_t word, int64_t count) {
    return as_words(widen_n(row + word, count));
  }
  // Values [dim, dim + count) of the kPerWord rows that share a word.
  template <class T> FLASHQ_SIMD static VecI load_pair_n(const T* a, const T*, int64_t dim, int64_t count) {
    return as_words(widen_n(a + dim, count));
  }
  FLASHQ_SIMD static void store_p(float* row, const VecF (&p)[kTileK / kLanes]) {
#pragma GCC unroll 16
    for (int i = 0; i < kTileK / kLanes; ++i) store(row + i * kLanes, p[i]);
  }
};
#if defined(__AVX512BF16__)
struct WordsBf16 {
  static constexpr int kPerWord = 2;
  FLASHQ_SIMD static VecF mac(VecF acc, VecF a, VecF b) { return dot_bf16(acc, as_words(a), as_words(b)); }
  FLASHQ_SIMD static VecI load_row_n(const Bf16* row, int64_t word, int64_t count) {
    return load_words_n(row + 2 * word, count);
  }
  FLASHQ_SIMD static VecI load_pair_n(const Bf16* a, const Bf16* b, int64_t dim, int64_t count) {
    return pair_rows_n(a + dim, b + dim, count);
  }
  FLASHQ_SIMD static void store_p(float* row, const VecF (&p)[kTileK / kLanes]) {
#pragma GCC unroll 16
    for (int i = 0; i < kTileK / kLanes; i += 2) store_words(row + i / 2 * kLanes, pack_bf16(p[i], p[i + 1]));
  }
};
using WordsOfBf16 = WordsBf16;
#else
using WordsOfBf16 = WordsF32;
#endif

// What a dtype implies: its operands, and how exact its exponentials have to be.
template <class T> struct Traits;
template <> struct Traits<float> {
  using Words = WordsF32;
  static constexpr int kExp2Degree = 6;
};
template <> struct Traits<Fp16> {
  using Words = WordsF32;
  static constexpr int kExp2Degree = 4;
};
template <> struct Traits<Bf16> {
  using Words = WordsOfBf16;
  static constexpr int kExp2Degree = 4;
};

}  // namespace
}  // namespace flashq::FLASHQ_ISA
