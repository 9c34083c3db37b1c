// TBQ4 products in int16: operands with two 16-bit values a word, sums exact in int32.
//
// How much that loses: the 16 centroids times kLevelScale lie close to integers (relative error 3.3e-5, the best scale
// below 6000), and queries and weights get the scale at which no sum can leave int32, whatever the codes: about 8e-5
// for queries, 5e-5 for flat weights. Together 1e-4 of the typical size of a score or an output.
#pragma once
#include "core/tbq4/codebook.h"
#include "cpu/tbq4/tile_rows.h"

#if defined(__AVX2__)

namespace flashq::FLASHQ_ISA {
namespace {

constexpr float kLevelScale = 23608.1834f;  // of the centroids of width 128; those of width 64 are sqrt(2) times larger
constexpr int kTopLevel = 5703;
constexpr float kSumLimit = 2.1e9f;  // of |operand| * kTopLevel; 2^31 less what rounding can add
constexpr tbq4::Table<int16_t, 8> kLevelMagnitudes{{268, 810, 1371, 1967, 2622, 3377, 4318, kTopLevel}};
constexpr int16_t int16_level(int index) {
  return static_cast<int16_t>(index < 8 ? -kLevelMagnitudes[7 - index] : kLevelMagnitudes[index - 8]);
}

// Operands of blocks of kWidth dims; kLayout(i) is the dim of the i-th value of a query's operands.
template <int kWidth, int (*kLayout)(int)> struct Int16Operands {
  static constexpr int kPerWord = 2;
  static constexpr float kSumUnit = (kWidth == 64 ? 1.41421356f : 1.f) / kLevelScale;

  // Operands of a rotated query's block; returns what a sum must be multiplied by, NaN if the query holds NaN or Inf (a
  // conversion to integers would lose them).
  FLASHQ_SIMD static float prepare_query(const float* q, float* words) {
    VecF top = zero(), total = zero();
    for (int i = 0; i < kWidth; i += kLanes) {
      top = max(top, abs(load(q + i)));
      total = add(total, abs(load(q + i)));
    }
    float unit;
    const float to_int = scale_of(reduce_max(top), reduce_add(total), unit);
    int16_t rounded[kWidth], ordered[kWidth];
    for (int i = 0; i < kWidth; i += kLanes) store_int16(rounded + i, mul(load(q + i), set1(to_int)));
    for (int i = 0; i < kWidth; ++i) ordered[i] = rounded[kLayout(i)];
    std::memcpy(words, ordered, sizeof ordered);
    return unit;
  }
  FLASHQ_SIMD static float prepare_weights(const VecF (&x)[kTileK / kLanes], float* words) {
    VecF top = zero(), total = zero();
#pragma GCC unroll 8
    for (int i = 0; i < kTileK / kLanes; ++i) {
      top = max(top, abs(x[i]));
      total = add(total, abs(x[i]));
    }
    float unit;
    const VecF to_int = set1(scale_of(reduce_max(top), reduce_add(total), unit));
#pragma GCC unroll 8
    for (int i = 0; i < kTileK / kLanes; ++i)
      store_int16(reinterpret_cast<int16_t*>(words) + i * kLanes, mul(x[i], to_int));
    return unit;
  }

 private:
  // The scale to integers, and the value of a unit of the sums. `total` is the sum of magnitudes: NaN where there was
  // one.
  FLASHQ_SIMD static float scale_of(float top, float total, float& unit) {
    if (!(total > 1e-30f)) {  // nothing, or less than a weight of 2^-99; or NaN
      unit = total - total;
      return 0;
    }
    const float to_int = min_of(32767.f / top, kSumLimit / kTopLevel / total);
    unit = kSumUnit / to_int + (total - total);
    return to_int;
  }
};

}  // namespace
}  // namespace flashq::FLASHQ_ISA

#endif
