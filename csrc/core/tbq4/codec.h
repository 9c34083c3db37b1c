// TBQ4 encode and decode of one block, to the last bit (docs/tbq4_format.md).
//
// The scalar rules come first, for any device; then whole blocks for one CPU thread.
// Every floating-point operation rounds once, in the order written; callers keep gradual underflow.
#pragma once
#include "core/half.h"
#include "core/tbq4/rotation.h"

namespace flashq::tbq4 {

// False for NaN and Inf: the block's energy, and then the block is poisoned.
FLASHQ_HD bool is_finite(float x) { return (bits_of(x) & 0x7f800000) != 0x7f800000; }

// The edges scaled to a block of this length, as bit patterns: those of numbers >= 0 order as integers.
FLASHQ_HD Table<int32_t, kEdges> scaled_edges(float length) {
  constexpr auto edges = kPositiveEdges;
  Table<int32_t, kEdges> bits;
  FLASHQ_UNROLL
  for (int k = 0; k < kEdges; ++k) bits.value[k] = static_cast<int32_t>(bits_of(ieee::mul(edges[k], length)));
  return bits;
}

// The index of a rotated value is the number of the 15 edges -t6 .. -t0, 0, t0 .. t6 that are <= v. By symmetry that is
// a sign and a magnitude 0..7: v >= 0 counts the t <= v, v < 0 the t < -v, the same count of an integer one smaller.
struct Level {
  int32_t index;   // of the centroids
  int32_t square;  // of the magnitude, kSquares
};
FLASHQ_HD Level level_of(float v, const Table<int32_t, kEdges>& edges) {
  constexpr auto squares = kSquares;
  const int32_t negative = v < 0 ? 1 : 0;  // not of -0, which is >= the edge 0
  const int32_t size = static_cast<int32_t>(bits_of(v) & 0x7fffffff) - negative;
  int32_t magnitude = 0, square = squares[0];
  FLASHQ_UNROLL
  for (int k = 0; k < kEdges; ++k) {
    const bool above = size >= edges.value[k];
    magnitude += above ? 1 : 0;
    square += above ? squares[k + 1] - squares[k] : 0;
  }
  return {(kMagnitudes + magnitude) ^ (15 * negative), square};
}

// The norm, fp16 bits: what gives the decoded block the length of the input. `energy` is the sum of kSquares.
template <int kWidth> FLASHQ_HD uint16_t norm_of(float length, int32_t energy) {
  const float decoded = ieee::sqrt(ieee::mul(static_cast<float>(energy), kSquaresScale<kWidth>));
  const float norm = ieee::div(length, decoded);
  return float_to_half(norm < kHalfMax ? norm : kHalfMax);
}

// The sum of the format: neighbours first, then neighbouring pairs, and so on.
template <int kCount> FLASHQ_HD float tree_sum(const float* x) {
  float sums[kCount / 2];
  FLASHQ_UNROLL
  for (int i = 0; i < kCount / 2; ++i) sums[i] = ieee::add(x[2 * i], x[2 * i + 1]);
  if constexpr (kCount == 2) {
    return sums[0];
  } else {
    return tree_sum<kCount / 2>(sums);
  }
}

template <int kWidth> FLASHQ_HD float energy_of(const float* x) {
  float squares[kWidth];
  FLASHQ_UNROLL
  for (int i = 0; i < kWidth; ++i) squares[i] = ieee::mul(x[i], x[i]);
  return tree_sum<kWidth>(squares);
}

template <int kWidth> FLASHQ_HOST void fill_codes(uint8_t* codes, uint8_t byte) {
  for (int j = 0; j < kWidth / 2; ++j) codes[j] = byte;
}

// x is destroyed. Returns the norm's bits; codes get kWidth / 2 bytes.
template <int kWidth> FLASHQ_HOST uint16_t encode_block(float* x, uint8_t* codes) {
  const float energy = energy_of<kWidth>(x);
  if (!is_finite(energy)) {
    fill_codes<kWidth>(codes, 0);
    return kPoisonNorm;
  }
  const float length = ieee::sqrt(energy);
  if (length <= kTiny) {
    fill_codes<kWidth>(codes, kZeroCodes);
    return 0;
  }
  flip<kWidth, Sign::kIn>(x);
  hadamard<kWidth>(x);
  flip<kWidth, Sign::kOut>(x);

  const auto edges = scaled_edges(length);
  int32_t indices[kWidth], decoded_energy = 0;
  for (int i = 0; i < kWidth; ++i) {
    const Level level = level_of(x[i], edges);
    indices[i] = level.index;
    decoded_energy += level.square;
  }
  for (int j = 0; j < kWidth / 2; ++j) codes[j] = static_cast<uint8_t>(indices[2 * j] | indices[2 * j + 1] << 4);
  return norm_of<kWidth>(length, decoded_energy);
}

// Codes to centroids, no norm and no rotation.
template <int kWidth> FLASHQ_HOST void expand_codes(const uint8_t* codes, float* values) {
  for (int j = 0; j < kWidth / 2; ++j) {
    values[2 * j] = centroid<kWidth>(codes[j] & 15);
    values[2 * j + 1] = centroid<kWidth>(codes[j] >> 4);
  }
}

template <int kWidth> FLASHQ_HOST void decode_block(const uint8_t* codes, uint16_t norm, float* out) {
  expand_codes<kWidth>(codes, out);
  flip<kWidth, Sign::kOut>(out);
  hadamard<kWidth>(out);
  scale<kWidth>(out, kInvSqrtWidth<kWidth>);
  scale<kWidth>(out, half_to_float(norm));
  flip<kWidth, Sign::kIn>(out);
}

}  // namespace flashq::tbq4
