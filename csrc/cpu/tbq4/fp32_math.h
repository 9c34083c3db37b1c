// TBQ4 products in fp32: the only arithmetic of the portable level, elsewhere the one for scores that int16 is too
// coarse for. A lookup gives one centroid a word.
#pragma once
#include "core/tbq4/codebook.h"
#include "cpu/tbq4/tile_rows.h"

namespace flashq::FLASHQ_ISA {
namespace {

template <int kWidth> struct Fp32Math {
  using Acc = VecF;
  static constexpr int kPerWord = 1;  // values of a word
  static constexpr int kCodeWords = kWidth / 8;

  FLASHQ_SIMD static Acc nothing() { return zero(); }
  FLASHQ_SIMD static Acc mac(Acc acc, VecI b, const float* a) { return fma(set1(*a), as_float(b), acc); }
  FLASHQ_SIMD static VecF value(Acc acc) { return acc; }
  FLASHQ_SIMD static Levels levels() {
    return Levels(kWidth == 64 ? tbq4::kCentroids64.value : tbq4::kCentroids128.value);
  }

  // b[dim][key]
  template <class Prefetch>
  FLASHQ_SIMD static void expand_keys(const uint8_t* codes, int64_t row_bytes, const TileRows& tile, float* b,
                                      const Prefetch& prefetch) {
    const Levels level = levels();
    for (int key = 0; key < kTileK; key += kLanes) {
      prefetch(key, key + kLanes);
      for (int word = 0; word < kCodeWords; word += kLanes) {
        VecI r[kLanes];
#pragma GCC unroll 16
        for (int i = 0; i < kLanes; ++i)
          r[i] = load_words_n(codes + tile.row[key + i] * row_bytes + 4 * word, kCodeWords - word);
        transpose(r);
        const int words = min_of(kLanes, kCodeWords - word);
        for (int i = 0; i < words; ++i)
#pragma GCC unroll 8
          for (int j = 0; j < 8; ++j) store(b + (8 * (word + i) + j) * kTileK + key, level(shift_right(r[i], 4 * j)));
      }
    }
  }
  // b[key][position]; dim_of(position) is the dim.
  template <class Prefetch>
  FLASHQ_SIMD static void expand_values(const uint8_t* codes, int64_t row_bytes, const TileRows& tile, float* b,
                                        const Prefetch& prefetch) {
    static_assert(kCodeWords % kLanes == 0 || kLanes == 16, "16 lanes expand values in int16");
    const Levels level = levels();
    for (int key = 0; key < kTileK; ++key) {
      prefetch(key, key + 1);
      for (int word = 0; word < kCodeWords; word += kLanes) {
        const VecI codes_of_8 = load_words(codes + tile.row[key] * row_bytes + 4 * word);
#pragma GCC unroll 8
        for (int j = 0; j < 8; ++j)
          store(b + key * kWidth + 8 * word + j * kLanes, level(shift_right(codes_of_8, 4 * j)));
      }
    }
  }
  static constexpr int dim_of(int position) {
    const int chunk = position / (8 * kLanes), step = position / kLanes % 8, lane = position % kLanes;
    return 8 * (chunk * kLanes + lane) + step;
  }

  // Operands of a rotated query's block; returns what a sum must be multiplied by.
  FLASHQ_SIMD static float prepare_query(const float* q, float* words) {
    std::memcpy(words, q, kWidth * sizeof(float));
    return 1;
  }
  // Operands of 64 weights; returns what a sum must be multiplied by.
  FLASHQ_SIMD static float prepare_weights(const VecF (&x)[kTileK / kLanes], float* words) {
#pragma GCC unroll 16
    for (int i = 0; i < kTileK / kLanes; ++i) store(words + i * kLanes, x[i]);
    return 1;
  }
};

}  // namespace
}  // namespace flashq::FLASHQ_ISA
