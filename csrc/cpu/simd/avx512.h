// AVX-512 (F, BW, VL, DQ, VNNI, BF16): 16 lanes. Included by simd.h.
#pragma once
// g++ 12 takes the deliberately undefined operands inside its own intrinsics for uninitialised variables.
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#include <immintrin.h>
#pragma GCC diagnostic pop

namespace flashq::FLASHQ_ISA {
namespace {

constexpr int kLanes = 16;
using VecF = __m512;
using VecI = __m512i;

// Lanes 0 .. count - 1, count >= 0.
FLASHQ_SIMD __mmask16 first_lanes(int64_t count) {
  return static_cast<__mmask16>(count >= kLanes ? 0xffff : (1u << count) - 1);
}

FLASHQ_SIMD VecF zero() { return _mm512_setzero_ps(); }
FLASHQ_SIMD VecF set1(float x) { return _mm512_set1_ps(x); }
FLASHQ_SIMD VecF load(const float* p) { return _mm512_loadu_ps(p); }
FLASHQ_SIMD void store(float* p, VecF x) { _mm512_storeu_ps(p, x); }
FLASHQ_SIMD VecF add(VecF a, VecF b) { return _mm512_add_ps(a, b); }
FLASHQ_SIMD VecF sub(VecF a, VecF b) { return _mm512_sub_ps(a, b); }
FLASHQ_SIMD VecF mul(VecF a, VecF b) { return _mm512_mul_ps(a, b); }
FLASHQ_SIMD VecF div(VecF a, VecF b) { return _mm512_div_ps(a, b); }
FLASHQ_SIMD VecF fma(VecF a, VecF b, VecF c) { return _mm512_fmadd_ps(a, b, c); }
FLASHQ_SIMD VecF max(VecF a, VecF b) { return _mm512_max_ps(a, b); }  // b if either is NaN
FLASHQ_SIMD VecF min(VecF a, VecF b) { return _mm512_min_ps(a, b); }  // the same
FLASHQ_SIMD VecF abs(VecF x) { return _mm512_abs_ps(x); }
FLASHQ_SIMD VecF copy_sign(VecF size, VecF sign) { return _mm512_or_ps(size, _mm512_and_ps(set1(-0.f), sign)); }
FLASHQ_SIMD VecF round(VecF x) { return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
FLASHQ_SIMD float reduce_max(VecF x) { return _mm512_reduce_max_ps(x); }
FLASHQ_SIMD float reduce_add(VecF x) { return _mm512_reduce_add_ps(x); }

// a < b ? yes : no in each lane; `no` where one of a and b is NaN.
FLASHQ_SIMD VecF select_less(VecF a, VecF b, VecF yes, VecF no) {
  return _mm512_mask_mov_ps(no, _mm512_cmp_ps_mask(a, b, _CMP_LT_OQ), yes);
}
// Lane i is x where bit i of `bits` is set, and `other` elsewhere, whatever x is there.
FLASHQ_SIMD VecF keep_bits(VecF x, uint64_t bits, VecF other) {
  return _mm512_mask_mov_ps(other, static_cast<__mmask16>(bits), x);
}

// x * 2^n for an integer n >= kExp2Floor.
constexpr float kExp2Floor = -200;  // 0 after rounding
FLASHQ_SIMD VecF scale_exp2(VecF x, VecF n) { return _mm512_scalef_ps(x, n); }

FLASHQ_SIMD VecF widen_n(const float* p, int64_t count) { return _mm512_maskz_loadu_ps(first_lanes(count), p); }
FLASHQ_SIMD VecF widen_n(const Fp16* p, int64_t count) {
  return _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(first_lanes(count), p));
}
FLASHQ_SIMD VecF widen_n(const Bf16* p, int64_t count) {
  const __m512i w = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(first_lanes(count), p));
  return _mm512_castsi512_ps(_mm512_slli_epi32(w, 16));
}
template <class T> FLASHQ_SIMD VecF widen(const T* p) { return widen_n(p, kLanes); }
FLASHQ_SIMD void narrow_n(float* p, VecF x, int64_t count) { _mm512_mask_storeu_ps(p, first_lanes(count), x); }
FLASHQ_SIMD void narrow_n(Fp16* p, VecF x, int64_t count) {
  _mm256_mask_storeu_epi16(p, first_lanes(count), _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
}
FLASHQ_SIMD void narrow_n(Bf16* p, VecF x, int64_t count) {
  _mm256_mask_storeu_epi16(p, first_lanes(count), (__m256i)_mm512_cvtneps_pbh(x));
}
template <class T> FLASHQ_SIMD void narrow(T* p, VecF x) { narrow_n(p, x, kLanes); }

// --- 32-bit words that hold codes, or pairs of 16-bit values
FLASHQ_SIMD VecI load_words(const void* p) { return _mm512_loadu_si512(p); }
FLASHQ_SIMD VecI load_words_n(const void* p, int64_t count) { return _mm512_maskz_loadu_epi32(first_lanes(count), p); }
FLASHQ_SIMD void store_words(void* p, VecI x) { _mm512_storeu_si512(p, x); }
FLASHQ_SIMD VecF as_float(VecI x) { return _mm512_castsi512_ps(x); }
FLASHQ_SIMD VecI as_words(VecF x) { return _mm512_castps_si512(x); }
FLASHQ_SIMD VecF to_float(VecI x) { return _mm512_cvtepi32_ps(x); }
FLASHQ_SIMD VecI shift_right(VecI x, int bits) { return bits ? _mm512_srli_epi32(x, static_cast<unsigned>(bits)) : x; }

// 16 x 16 words, in place: 64 shuffles.
FLASHQ_SIMD void transpose(VecI (&r)[kLanes]) {
  VecI t[16];
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) {
    t[2 * i] = _mm512_unpacklo_epi32(r[2 * i], r[2 * i + 1]);
    t[2 * i + 1] = _mm512_unpackhi_epi32(r[2 * i], r[2 * i + 1]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    r[4 * i] = _mm512_unpacklo_epi64(t[4 * i], t[4 * i + 2]);
    r[4 * i + 1] = _mm512_unpackhi_epi64(t[4 * i], t[4 * i + 2]);
    r[4 * i + 2] = _mm512_unpacklo_epi64(t[4 * i + 1], t[4 * i + 3]);
    r[4 * i + 3] = _mm512_unpackhi_epi64(t[4 * i + 1], t[4 * i + 3]);
  }
#pragma GCC unroll 4
  for (int k = 0; k < 4; ++k) {  // r[4i + k], 128-bit lane L: column 4L + k of rows 4i .. 4i+3
    const VecI a = _mm512_shuffle_i32x4(r[k], r[4 + k], 0x88), b = _mm512_shuffle_i32x4(r[k], r[4 + k], 0xdd);
    const VecI c = _mm512_shuffle_i32x4(r[8 + k], r[12 + k], 0x88);
    const VecI d = _mm512_shuffle_i32x4(r[8 + k], r[12 + k], 0xdd);
    t[k] = _mm512_shuffle_i32x4(a, c, 0x88);
    t[8 + k] = _mm512_shuffle_i32x4(a, c, 0xdd);
    t[4 + k] = _mm512_shuffle_i32x4(b, d, 0x88);
    t[12 + k] = _mm512_shuffle_i32x4(b, d, 0xdd);
  }
#pragma GCC unroll 16
  for (int i = 0; i < 16; ++i) r[i] = t[i];
}

// Lane i of the result is the sum of the lanes of v[i].
FLASHQ_SIMD VecF sum_each(const VecF (&v)[kLanes]) {
  VecF a[8], b[4], c[2];
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i)
    a[i] = add(_mm512_shuffle_f32x4(v[i], v[i + 8], 0x88), _mm512_shuffle_f32x4(v[i], v[i + 8], 0xdd));
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i)
    b[i] = add(_mm512_shuffle_f32x4(a[i], a[i + 4], 0x88), _mm512_shuffle_f32x4(a[i], a[i + 4], 0xdd));
#pragma GCC unroll 2
  for (int i = 0; i < 2; ++i) c[i] = add(_mm512_unpacklo_ps(b[i], b[i + 2]), _mm512_unpackhi_ps(b[i], b[i + 2]));
  const VecF r = add(_mm512_unpacklo_ps(c[0], c[1]), _mm512_unpackhi_ps(c[0], c[1]));
  return _mm512_shuffle_f32x4(r, r, 0b11011000);  // 128-bit lanes hold vectors 0, 8, 4, 12 + {0..3}
}

// 16 fp32 levels, indexed by the low 4 bits of each word: vpermps ignores the others, so no AND.
struct Levels {
  VecF all;
  FLASHQ_SIMD explicit Levels(const float* c) : all(load(c)) {}
  FLASHQ_SIMD VecF operator()(VecI index) const { return _mm512_permutexvar_ps(index, all); }
};

// --- 16-bit arithmetic: pairs of bf16 or int16 in each word
FLASHQ_SIMD VecF dot_bf16(VecF acc, VecI a, VecI b) { return _mm512_dpbf16_ps(acc, (__m512bh)a, (__m512bh)b); }
FLASHQ_SIMD VecI dot_int16(VecI acc, VecI a, VecI b) { return _mm512_dpwssd_epi32(acc, a, b); }
FLASHQ_SIMD VecI set1_word(const void* p) {  // one load with broadcast, never through a general register
  float word;
  std::memcpy(&word, p, 4);
  return _mm512_castps_si512(_mm512_set1_ps(word));
}
// Word i = (16-bit value i of row a, value i of row b): operands of a dot product over two rows.
FLASHQ_SIMD VecI pair_rows_n(const void* a, const void* b, int64_t count) {
  alignas(64) static constexpr uint16_t kInterleave[32] = {0,  16, 1,  17, 2,  18, 3,  19, 4,  20, 5,
                                                           21, 6,  22, 7,  23, 8,  24, 9,  25, 10, 26,
                                                           11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
  const __mmask16 lanes = first_lanes(count);
  const __m512i low = _mm512_zextsi256_si512(_mm256_maskz_loadu_epi16(lanes, a));
  const __m512i both = _mm512_inserti64x4(low, _mm256_maskz_loadu_epi16(lanes, b), 1);
  return _mm512_permutexvar_epi16(_mm512_load_si512(kInterleave), both);
}
FLASHQ_SIMD VecI pair_rows(const void* a, const void* b) { return pair_rows_n(a, b, kLanes); }  // 32 bytes of each
FLASHQ_SIMD VecI pack_bf16(VecF low, VecF high) { return (VecI)_mm512_cvtne2ps_pbh(high, low); }
FLASHQ_SIMD void store_int16(int16_t* p, VecF x) {  // rounds to nearest even
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(_mm512_cvtps_epi32(x)));
}
// 16 int16 levels twice, so that vpermw's fifth index bit, which belongs to the next code, does not matter.
struct Levels16 {
  VecI all;
  FLASHQ_SIMD explicit Levels16(const int16_t* c) : all(_mm512_loadu_si512(c)) {}
  FLASHQ_SIMD VecI operator()(VecI index) const { return _mm512_permutexvar_epi16(index, all); }
};

}  // namespace
}  // namespace flashq::FLASHQ_ISA
