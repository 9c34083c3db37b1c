// AVX2 + FMA + F16C: 8 lanes. Included by simd.h.
#pragma once
#include <immintrin.h>

namespace flashq::FLASHQ_ISA {
namespace {

constexpr int kLanes = 8;
using VecF = __m256;
using VecI = __m256i;

FLASHQ_SIMD VecF zero() { return _mm256_setzero_ps(); }
FLASHQ_SIMD VecF set1(float x) { return _mm256_set1_ps(x); }
FLASHQ_SIMD VecF load(const float* p) { return _mm256_loadu_ps(p); }
FLASHQ_SIMD void store(float* p, VecF x) { _mm256_storeu_ps(p, x); }
FLASHQ_SIMD VecF add(VecF a, VecF b) { return _mm256_add_ps(a, b); }
FLASHQ_SIMD VecF sub(VecF a, VecF b) { return _mm256_sub_ps(a, b); }
FLASHQ_SIMD VecF mul(VecF a, VecF b) { return _mm256_mul_ps(a, b); }
FLASHQ_SIMD VecF div(VecF a, VecF b) { return _mm256_div_ps(a, b); }
FLASHQ_SIMD VecF fma(VecF a, VecF b, VecF c) { return _mm256_fmadd_ps(a, b, c); }
FLASHQ_SIMD VecF max(VecF a, VecF b) { return _mm256_max_ps(a, b); }  // b if either is NaN
FLASHQ_SIMD VecF min(VecF a, VecF b) { return _mm256_min_ps(a, b); }  // the same
FLASHQ_SIMD VecF abs(VecF x) { return _mm256_andnot_ps(set1(-0.f), x); }
FLASHQ_SIMD VecF copy_sign(VecF size, VecF sign) { return _mm256_or_ps(size, _mm256_and_ps(set1(-0.f), sign)); }
FLASHQ_SIMD VecF round(VecF x) { return _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
FLASHQ_SIMD float reduce_max(VecF x) {
  __m128 m = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  m = _mm_max_ps(m, _mm_movehl_ps(m, m));
  return _mm_cvtss_f32(_mm_max_ss(m, _mm_movehdup_ps(m)));
}
FLASHQ_SIMD float reduce_add(VecF x) {
  __m128 m = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  m = _mm_add_ps(m, _mm_movehl_ps(m, m));
  return _mm_cvtss_f32(_mm_add_ss(m, _mm_movehdup_ps(m)));
}

// a < b ? yes : no in each lane; `no` where one of a and b is NaN.
FLASHQ_SIMD VecF select_less(VecF a, VecF b, VecF yes, VecF no) {
  return _mm256_blendv_ps(no, yes, _mm256_cmp_ps(a, b, _CMP_LT_OQ));
}
// Lane i is x where bit i of `bits` is set, and `other` elsewhere, whatever x is there.
FLASHQ_SIMD VecF keep_bits(VecF x, uint64_t bits, VecF other) {
  const __m256i lane = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
  const __m256i set = _mm256_and_si256(_mm256_set1_epi32(static_cast<int32_t>(bits)), lane);
  return _mm256_blendv_ps(other, x, _mm256_castsi256_ps(_mm256_cmpeq_epi32(set, lane)));
}

// x * 2^n for an integer n >= kExp2Floor. The exponent n + 127 is built by hand: -127 gives the bits of 0.
constexpr float kExp2Floor = -127;
FLASHQ_SIMD VecF scale_exp2(VecF x, VecF n) {
  const __m256i exponent = _mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127));
  return mul(x, _mm256_castsi256_ps(_mm256_slli_epi32(exponent, 23)));
}

FLASHQ_SIMD VecF widen(const float* p) { return load(p); }
FLASHQ_SIMD VecF widen(const Fp16* p) { return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))); }
FLASHQ_SIMD VecF widen(const Bf16* p) {
  const __m256i w = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  return _mm256_castsi256_ps(_mm256_slli_epi32(w, 16));
}
FLASHQ_SIMD void narrow(float* p, VecF x) { store(p, x); }
FLASHQ_SIMD void narrow(Fp16* p, VecF x) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
}
FLASHQ_SIMD void narrow(Bf16* p, VecF x) {  // nearest even; a NaN keeps a mantissa bit
  const __m256i w = _mm256_castps_si256(x);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(w, 16), _mm256_set1_epi32(1));
  __m256i r = _mm256_srli_epi32(_mm256_add_epi32(w, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff))), 16);
  const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
  r = _mm256_blendv_epi8(r, _mm256_set1_epi32(0x7fc0), nan);
  r = _mm256_permute4x64_epi64(_mm256_packus_epi32(r, r), 0x08);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_castsi256_si128(r));
}
template <class T> FLASHQ_SIMD VecF widen_n(const T* p, int64_t) { return widen(p); }
template <class T> FLASHQ_SIMD void narrow_n(T* p, VecF x, int64_t) { narrow(p, x); }

// --- 32-bit words that hold codes, or pairs of 16-bit values
FLASHQ_SIMD VecI load_words(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }
FLASHQ_SIMD VecI load_words_n(const void* p, int64_t) { return load_words(p); }
FLASHQ_SIMD void store_words(void* p, VecI x) { _mm256_storeu_si256(static_cast<__m256i*>(p), x); }
FLASHQ_SIMD VecF as_float(VecI x) { return _mm256_castsi256_ps(x); }
FLASHQ_SIMD VecI as_words(VecF x) { return _mm256_castps_si256(x); }
FLASHQ_SIMD VecF to_float(VecI x) { return _mm256_cvtepi32_ps(x); }
FLASHQ_SIMD VecI shift_right(VecI x, int bits) { return bits ? _mm256_srli_epi32(x, bits) : x; }
FLASHQ_SIMD void store_int16(int16_t* p, VecF x) {  // rounds to nearest even
  const __m256i i = _mm256_cvtps_epi32(x);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p),
                   _mm_packs_epi32(_mm256_castsi256_si128(i), _mm256_extracti128_si256(i, 1)));
}

// 8 x 8 words, in place: 24 shuffles.
FLASHQ_SIMD void transpose(VecI (&r)[kLanes]) {
  VecI t[8];
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    t[2 * i] = _mm256_unpacklo_epi32(r[2 * i], r[2 * i + 1]);
    t[2 * i + 1] = _mm256_unpackhi_epi32(r[2 * i], r[2 * i + 1]);
  }
#pragma GCC unroll 2
  for (int i = 0; i < 2; ++i) {
    r[4 * i] = _mm256_unpacklo_epi64(t[4 * i], t[4 * i + 2]);
    r[4 * i + 1] = _mm256_unpackhi_epi64(t[4 * i], t[4 * i + 2]);
    r[4 * i + 2] = _mm256_unpacklo_epi64(t[4 * i + 1], t[4 * i + 3]);
    r[4 * i + 3] = _mm256_unpackhi_epi64(t[4 * i + 1], t[4 * i + 3]);
  }
#pragma GCC unroll 4
  for (int k = 0; k < 4; ++k) {
    t[k] = _mm256_permute2x128_si256(r[k], r[4 + k], 0x20);
    t[4 + k] = _mm256_permute2x128_si256(r[k], r[4 + k], 0x31);
  }
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) r[i] = t[i];
}

// Lane i of the result is the sum of the lanes of v[i].
FLASHQ_SIMD VecF sum_each(const VecF (&v)[kLanes]) {
  const VecF a = _mm256_hadd_ps(_mm256_hadd_ps(v[0], v[1]), _mm256_hadd_ps(v[2], v[3]));
  const VecF b = _mm256_hadd_ps(_mm256_hadd_ps(v[4], v[5]), _mm256_hadd_ps(v[6], v[7]));
  return add(_mm256_permute2f128_ps(a, b, 0x20), _mm256_permute2f128_ps(a, b, 0x31));
}

// 16 fp32 levels, indexed by the low 4 bits of each word. vpermps has 8 entries: look up both halves and let bit 3 of
// the index, moved to the sign, choose.
struct Levels {
  VecF low, high;
  FLASHQ_SIMD explicit Levels(const float* c) : low(load(c)), high(load(c + 8)) {}
  FLASHQ_SIMD VecF operator()(VecI index) const {
    const VecF choose = _mm256_castsi256_ps(_mm256_slli_epi32(index, 28));
    return _mm256_blendv_ps(_mm256_permutevar8x32_ps(low, index), _mm256_permutevar8x32_ps(high, index), choose);
  }
};

}  // namespace
}  // namespace flashq::FLASHQ_ISA
