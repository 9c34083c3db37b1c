// Any CPU: 4 lanes in the compiler's own vector types (SSE2 on x86-64, NEON on AArch64). No FMA is assumed. Included by
// simd.h.
#pragma once
#include "core/half.h"

namespace flashq::FLASHQ_ISA {
namespace {

constexpr int kLanes = 4;
typedef float VecF __attribute__((vector_size(16)));
typedef int32_t VecI __attribute__((vector_size(16)));

FLASHQ_SIMD VecF zero() { return VecF{}; }
FLASHQ_SIMD VecF set1(float x) { return VecF{x, x, x, x}; }
FLASHQ_SIMD VecF load(const float* p) {
  VecF x;
  std::memcpy(&x, p, sizeof x);
  return x;
}
FLASHQ_SIMD void store(float* p, VecF x) { std::memcpy(p, &x, sizeof x); }
FLASHQ_SIMD VecF as_float(VecI x) { return (VecF)x; }
FLASHQ_SIMD VecI as_words(VecF x) { return (VecI)x; }
FLASHQ_SIMD VecF add(VecF a, VecF b) { return a + b; }
FLASHQ_SIMD VecF sub(VecF a, VecF b) { return a - b; }
FLASHQ_SIMD VecF mul(VecF a, VecF b) { return a * b; }
FLASHQ_SIMD VecF div(VecF a, VecF b) { return a / b; }
FLASHQ_SIMD VecF fma(VecF a, VecF b, VecF c) { return a * b + c; }
FLASHQ_SIMD VecF max(VecF a, VecF b) { return a > b ? a : b; }  // b if either is NaN
FLASHQ_SIMD VecF min(VecF a, VecF b) { return a < b ? a : b; }  // the same
FLASHQ_SIMD VecF abs(VecF x) { return as_float(as_words(x) & 0x7fffffff); }
FLASHQ_SIMD VecF copy_sign(VecF size, VecF sign) { return as_float(as_words(size) | (as_words(sign) & INT32_MIN)); }
FLASHQ_SIMD VecF round(VecF x) {  // nearest even, for |x| < 2^22: beside 1.5 * 2^23 the grid has steps of 1
  const VecF shift = set1(0x1.8p23f);
  return (x + shift) - shift;
}
FLASHQ_SIMD float reduce_max(VecF x) {
  const VecF m = max(x, __builtin_shufflevector(x, x, 2, 3, 2, 3));
  return m[0] > m[1] ? m[0] : m[1];
}
FLASHQ_SIMD float reduce_add(VecF x) {
  const VecF m = x + __builtin_shufflevector(x, x, 2, 3, 2, 3);
  return m[0] + m[1];
}

// a < b ? yes : no in each lane; `no` where one of a and b is NaN.
FLASHQ_SIMD VecF select_less(VecF a, VecF b, VecF yes, VecF no) { return a < b ? yes : no; }
// Lane i is x where bit i of `bits` is set, and `other` elsewhere, whatever x is there.
FLASHQ_SIMD VecF keep_bits(VecF x, uint64_t bits, VecF other) {
  const int32_t b = static_cast<int32_t>(bits);
  return (VecI{b, b, b, b} & VecI{1, 2, 4, 8}) != 0 ? x : other;
}

// x * 2^n for an integer n >= kExp2Floor. The exponent n + 127 is built by hand: -127 gives the bits of 0. The sum with
// 1.5 * 2^23 holds n in its low bits; a conversion of a NaN to int would be undefined.
constexpr float kExp2Floor = -127;
FLASHQ_SIMD VecF scale_exp2(VecF x, VecF n) {
  typedef uint32_t VecU __attribute__((vector_size(16)));
  const VecU exponent = (VecU)(n + set1(0x1.8p23f)) + 127u;
  return x * (VecF)(exponent << 23);
}

FLASHQ_SIMD VecF widen(const float* p) { return load(p); }
FLASHQ_SIMD VecF widen(const Fp16* p) {
  VecF x;
  for (int i = 0; i < kLanes; ++i) x[i] = half_to_float(p[i].bits);
  return x;
}
FLASHQ_SIMD VecF widen(const Bf16* p) {
  VecF x;
  for (int i = 0; i < kLanes; ++i) x[i] = bfloat_to_float(p[i].bits);
  return x;
}
FLASHQ_SIMD void narrow(float* p, VecF x) { store(p, x); }
FLASHQ_SIMD void narrow(Fp16* p, VecF x) {
  for (int i = 0; i < kLanes; ++i) p[i].bits = float_to_half(x[i]);
}
FLASHQ_SIMD void narrow(Bf16* p, VecF x) {
  for (int i = 0; i < kLanes; ++i) p[i].bits = float_to_bfloat(x[i]);
}
template <class T> FLASHQ_SIMD VecF widen_n(const T* p, int64_t) { return widen(p); }
template <class T> FLASHQ_SIMD void narrow_n(T* p, VecF x, int64_t) { narrow(p, x); }

// --- 32-bit words that hold codes
FLASHQ_SIMD VecI load_words(const void* p) {
  VecI x;
  std::memcpy(&x, p, sizeof x);
  return x;
}
FLASHQ_SIMD VecI load_words_n(const void* p, int64_t) { return load_words(p); }
FLASHQ_SIMD void store_words(void* p, VecI x) { std::memcpy(p, &x, sizeof x); }
FLASHQ_SIMD VecF to_float(VecI x) { return __builtin_convertvector(x, VecF); }
FLASHQ_SIMD VecI shift_right(VecI x, int bits) {
  typedef uint32_t VecU __attribute__((vector_size(16)));
  return (VecI)((VecU)x >> static_cast<uint32_t>(bits));
}

// 4 x 4 words, in place.
FLASHQ_SIMD void transpose(VecI (&r)[kLanes]) {
  const VecI a = __builtin_shufflevector(r[0], r[1], 0, 4, 1, 5), b = __builtin_shufflevector(r[0], r[1], 2, 6, 3, 7);
  const VecI c = __builtin_shufflevector(r[2], r[3], 0, 4, 1, 5), d = __builtin_shufflevector(r[2], r[3], 2, 6, 3, 7);
  r[0] = __builtin_shufflevector(a, c, 0, 1, 4, 5);
  r[1] = __builtin_shufflevector(a, c, 2, 3, 6, 7);
  r[2] = __builtin_shufflevector(b, d, 0, 1, 4, 5);
  r[3] = __builtin_shufflevector(b, d, 2, 3, 6, 7);
}

// Lane i of the result is the sum of the lanes of v[i].
FLASHQ_SIMD VecF sum_each(const VecF (&v)[kLanes]) {
  VecI t[kLanes] = {as_words(v[0]), as_words(v[1]), as_words(v[2]), as_words(v[3])};
  transpose(t);
  return (as_float(t[0]) + as_float(t[1])) + (as_float(t[2]) + as_float(t[3]));
}

// 16 fp32 levels, indexed by the low 4 bits of each word.
struct Levels {
  const float* all;
  FLASHQ_SIMD explicit Levels(const float* c) : all(c) {}
  FLASHQ_SIMD VecF operator()(VecI index) const {
    return VecF{all[index[0] & 15], all[index[1] & 15], all[index[2] & 15], all[index[3] & 15]};
  }
};

}  // namespace
}  // namespace flashq::FLASHQ_ISA
