// TBQ4 products in int16 on AVX-512: a lookup (vpermw) gives two centroids a word, one instruction multiplies and adds
// both. Operands are expanded for the product of product.h.
#pragma once
#include "cpu/tbq4/int16_operands.h"

#if defined(__AVX512F__)

namespace flashq::FLASHQ_ISA {
namespace {

// Both halves of the table are the 16 levels: vpermw's fifth index bit belongs to the next code.
struct Levels16Table { int16_t level[32]; };
constexpr Levels16Table make_levels16() {
  Levels16Table t{};
  for (int i = 0; i < 32; ++i) t.level[i] = int16_level(i % 16);
  return t;
}
alignas(64) constexpr Levels16Table kLevels16 = make_levels16();

// Word 4 w + j of a query holds dims 8 w + j and 8 w + 4 + j.
constexpr int expanded_query_dim(int i) { return i / 8 * 8 + i % 8 / 2 + i % 2 * 4; }

template <int kWidth> struct ExpandedInt16 : Int16Operands<kWidth, expanded_query_dim> {
  using Acc = VecI;
  static constexpr int kCodeWords = kWidth / 8;

  FLASHQ_SIMD static Acc nothing() { return _mm512_setzero_si512(); }
  FLASHQ_SIMD static Acc mac(Acc acc, VecI b, const float* a) { return dot_int16(acc, b, set1_word(a)); }
  FLASHQ_SIMD static VecF value(Acc acc) { return to_float(acc); }

  // b[word][key]
  template <class Prefetch>
  FLASHQ_SIMD static void expand_keys(const uint8_t* codes, int64_t row_bytes, const TileRows& tile, float* b,
                                      const Prefetch& prefetch) {
    const Levels16 level(kLevels16.level);
    for (int key = 0; key < kTileK; key += kLanes) {
      VecI r[kLanes];
#pragma GCC unroll 16
      for (int i = 0; i < kLanes; ++i) r[i] = load_words_n(codes + tile.row[key + i] * row_bytes, kCodeWords);
      prefetch(key, key + kLanes);
      transpose(r);
#pragma GCC unroll 16
      for (int w = 0; w < kCodeWords; ++w)
#pragma GCC unroll 4
        for (int j = 0; j < 4; ++j) store_words(b + (4 * w + j) * kTileK + key, level(shift_right(r[w], 4 * j)));
    }
  }
  // b[key / 2][position]
  template <class Prefetch>
  FLASHQ_SIMD static void expand_values(const uint8_t* codes, int64_t row_bytes, const TileRows& tile, float* b,
                                        const Prefetch& prefetch) {
    const Levels16 level(kLevels16.level);
    for (int key = 0; key < kTileK; key += 2) {
      const uint8_t *even = codes + tile.row[key] * row_bytes, *odd = codes + tile.row[key + 1] * row_bytes;
      prefetch(key, key + 2);
#pragma GCC unroll 2
      for (int chunk = 0; chunk < kWidth / 64; ++chunk) {
        const VecI pairs = pair_rows(even + 32 * chunk, odd + 32 * chunk);  // 4 codes of either key a word
#pragma GCC unroll 4
        for (int j = 0; j < 4; ++j)
          store_words(b + key / 2 * kWidth + 64 * chunk + j * kLanes, level(shift_right(pairs, 4 * j)));
      }
    }
  }
  static constexpr int dim_of(int position) {
    return position / 64 * 64 + 4 * (position % kLanes) + position / kLanes % 4;
  }
};

}  // namespace
}  // namespace flashq::FLASHQ_ISA

#endif
