// The rotation of a TBQ4 block: a Hadamard transform between two sign flips. Orthogonal, so it can move to the queries.
//
// Whole blocks of one thread; on the CPU each stage is a loop that the compiler vectorises, on a GPU everything is
// unrolled. Additions happen in the order of the format. cuda/tbq4/lanes.cuh shares a block among lanes.
#pragma once
#include "core/ieee.h"
#include "core/tbq4/codebook.h"

namespace flashq::tbq4 {

enum class Sign { kIn, kOut };  // s1, s2

// The fp32 sign bit of element i of a sign vector, and the flip: exact, and 0 becomes -0.
template <Sign kSign> FLASHQ_HD constexpr uint32_t sign_bit(int i) {
  constexpr auto mask = kSign == Sign::kIn ? kSignIn : kSignOut;
  return (mask[i / 32] >> (i % 32) & 1) << 31;
}
FLASHQ_HD float flip(float x, uint32_t sign) { return float_of(bits_of(x) ^ sign); }

template <Sign kSign> FLASHQ_HOST constexpr Table<uint32_t, 128> sign_bits() {
  Table<uint32_t, 128> bits{};
  for (int i = 0; i < 128; ++i) bits.value[i] = sign_bit<kSign>(i);
  return bits;
}
constexpr auto kSignBitsIn = sign_bits<Sign::kIn>(), kSignBitsOut = sign_bits<Sign::kOut>();

template <int kWidth, Sign kSign> FLASHQ_HOST void flip(float* v) {
  const auto& signs = kSign == Sign::kIn ? kSignBitsIn : kSignBitsOut;
  for (int i = 0; i < kWidth; ++i) v[i] = flip(v[i], signs.value[i]);
}

template <int kWidth, int kHalf> FLASHQ_HD void butterfly_stage(float* v) {
  FLASHQ_UNROLL
  for (int base = 0; base < kWidth; base += 2 * kHalf) {
    FLASHQ_UNROLL
    for (int i = base; i < base + kHalf; ++i) {
      const float a = v[i], b = v[i + kHalf];
      v[i] = ieee::add(a, b);
      v[i + kHalf] = ieee::sub(a, b);
    }
  }
}

// The un-normalised Walsh-Hadamard transform in natural order: stages 1, 2, 4, ..., kWidth / 2.
template <int kWidth, int kHalf = 1> FLASHQ_HD void hadamard(float* v) {
  butterfly_stage<kWidth, kHalf>(v);
  if constexpr (2 * kHalf < kWidth) hadamard<kWidth, 2 * kHalf>(v);
}

template <int kWidth> FLASHQ_HOST void scale(float* v, float factor) {
  for (int i = 0; i < kWidth; ++i) v[i] = ieee::mul(v[i], factor);
}

// Queries: s2 * (H (s1 * v) * kWidth^-0.5).
template <int kWidth> FLASHQ_HOST void rotate(float* v) {
  flip<kWidth, Sign::kIn>(v);
  hadamard<kWidth>(v);
  scale<kWidth>(v, kInvSqrtWidth<kWidth>);
  flip<kWidth, Sign::kOut>(v);
}

// Attention outputs: the inverse, s1 * (H (s2 * v) * kWidth^-0.5).
template <int kWidth> FLASHQ_HOST void unrotate(float* v) {
  flip<kWidth, Sign::kOut>(v);
  hadamard<kWidth>(v);
  scale<kWidth>(v, kInvSqrtWidth<kWidth>);
  flip<kWidth, Sign::kIn>(v);
}

}  // namespace flashq::tbq4
