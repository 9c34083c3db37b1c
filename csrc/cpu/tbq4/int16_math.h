// TBQ4 products in int16: a lookup gives two centroids a word, one instruction (two before VNNI) multiplies and adds
// both, and a tile's sums are exact in int32.
//
// How much that loses: the 16 centroids times kLevelScale lie close to integers (relative error 3.3e-5, the best scale
// below 6000), and queries and weights get the scale at which no sum can leave int32, whatever the codes: about 8e-5
// for queries, 5e-5 for flat weights. Together 1e-4 of the typical size of a score or an output.
#pragma once
#include "cpu/tbq4/fp32_math.h"

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

#if defined(__AVX512F__)
// Both halves of the table are the 16 levels: vpermw's fifth index bit belongs to the next code.
struct Levels16Table { int16_t level[32]; };
constexpr Levels16Table make_levels16() {
  Levels16Table t{};
  for (int i = 0; i < 32; ++i) t.level[i] = int16_level(i % 16);
  return t;
}
alignas(64) constexpr Levels16Table kLevels16 = make_levels16();

FLASHQ_SIMD VecI mac16(VecI acc, VecI a, VecI b) { return dot_int16(acc, a, b); }
FLASHQ_SIMD VecI no_sum16() { return _mm512_setzero_si512(); }
FLASHQ_SIMD VecI broadcast16(const float* word) { return set1_word(word); }
#else
// vpshufb looks bytes up: the low and the high bytes of the levels, once for each half of the vector.
struct LevelBytes { uint8_t low[32], high[32]; };
constexpr LevelBytes make_level_bytes() {
  LevelBytes t{};
  for (int i = 0; i < 32; ++i) {
    t.low[i] = static_cast<uint8_t>(static_cast<uint16_t>(int16_level(i % 16)) & 255);
    t.high[i] = static_cast<uint8_t>(static_cast<uint16_t>(int16_level(i % 16)) >> 8);
  }
  return t;
}
alignas(64) constexpr LevelBytes kLevelBytes = make_level_bytes();

FLASHQ_SIMD VecI mac16(VecI acc, VecI a, VecI b) { return _mm256_add_epi32(acc, _mm256_madd_epi16(a, b)); }
FLASHQ_SIMD VecI no_sum16() { return _mm256_setzero_si256(); }
FLASHQ_SIMD VecI broadcast16(const float* word) { return as_words(set1(*word)); }
FLASHQ_SIMD void store_int16(int16_t* p, VecF x) {  // rounds to nearest even
  const __m256i i = _mm256_cvtps_epi32(x);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p),
                   _mm_packs_epi32(_mm256_castsi256_si128(i), _mm256_extracti128_si256(i, 1)));
}

// Looks the 32 low nibbles of `index` up: the results of a half's first and last 8 bytes, in 16 bits each.
struct ByteLevels {
  VecI low = load_words(kLevelBytes.low), high = load_words(kLevelBytes.high), nibble = _mm256_set1_epi8(15);

  FLASHQ_SIMD void operator()(VecI index, VecI& first, VecI& last) const {
    const VecI i = _mm256_and_si256(index, nibble);
    const VecI l = _mm256_shuffle_epi8(low, i), h = _mm256_shuffle_epi8(high, i);
    first = _mm256_unpacklo_epi8(l, h);
    last = _mm256_unpackhi_epi8(l, h);
  }
};
#endif

template <int kWidth> struct Int16Math {
  using Acc = VecI;
  static constexpr int kPerWord = 2;
  static constexpr int kCodeWords = kWidth / 8;
  static constexpr float kSumUnit = (kWidth == 64 ? 1.41421356f : 1.f) / kLevelScale;

  FLASHQ_SIMD static Acc nothing() { return no_sum16(); }
  FLASHQ_SIMD static Acc mac(Acc acc, VecI b, const float* a) { return mac16(acc, b, broadcast16(a)); }
  FLASHQ_SIMD static VecF value(Acc acc) { return to_float(acc); }

#if defined(__AVX512F__)
  // Word 4 w + j of a row holds dims 8 w + j and 8 w + 4 + j.
  static constexpr int first_of_pair(int j) { return j; }
  static constexpr int kPairStep = 4;

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
#else
  // Words 4 w .. 4 w + 3 of a row hold dims 8 w + {0, 2}, {1, 3}, {4, 6}, {5, 7}.
  static constexpr int first_of_pair(int j) { return j / 2 * 4 + j % 2; }
  static constexpr int kPairStep = 2;

  // b[word][key]. 16 keys at a time: two transposes of 8 rows, then pairs of bytes of all 16, in the order in which the
  // unpacking after the lookup leaves keys 0 .. 7 and 8 .. 15.
  template <class Prefetch>
  FLASHQ_SIMD static void expand_keys(const uint8_t* codes, int64_t row_bytes, const TileRows& tile, float* b,
                                      const Prefetch& prefetch) {
    static constexpr int kEven[8] = {0, 2, 8, 10, 4, 6, 12, 14};
    const ByteLevels level;
    for (int key = 0; key < kTileK; key += 16)
      for (int word = 0; word < kCodeWords; word += 8) {
        VecI even[8], odd[8];
#pragma GCC unroll 8
        for (int i = 0; i < 8; ++i) even[i] = load_words(codes + tile.row[key + kEven[i]] * row_bytes + 4 * word);
        transpose(even);
        prefetch(key + word * 16 / kCodeWords, key + (word + 8) * 16 / kCodeWords);
#pragma GCC unroll 8
        for (int i = 0; i < 8; ++i) odd[i] = load_words(codes + tile.row[key + kEven[i] + 1] * row_bytes + 4 * word);
        transpose(odd);
        float* to = b + 4 * word * kTileK + key;
#pragma GCC unroll 8
        for (int w = 0; w < 8; ++w, to += 4 * kTileK) {
          const VecI low = _mm256_blend_epi16(even[w], _mm256_slli_epi32(odd[w], 16), 0xaa);
          const VecI high = _mm256_blend_epi16(_mm256_srli_epi32(even[w], 16), odd[w], 0xaa);
          store_pair(level, low, to);
          store_pair(level, high, to + 2 * kTileK);
        }
      }
  }
  FLASHQ_SIMD static void store_pair(const ByteLevels& level, VecI codes, float* to) {
    VecI first, last;
    level(codes, first, last);
    store_words(to, first);
    store_words(to + 8, last);
    level(_mm256_srli_epi32(codes, 4), first, last);
    store_words(to + kTileK, first);
    store_words(to + kTileK + 8, last);
  }
  // b[key / 2][position]
  template <class Prefetch>
  FLASHQ_SIMD static void expand_values(const uint8_t* codes, int64_t row_bytes, const TileRows& tile, float* b,
                                        const Prefetch& prefetch) {
    const ByteLevels level;
    for (int key = 0; key < kTileK; key += 2) {
      const uint8_t *even = codes + tile.row[key] * row_bytes, *odd = codes + tile.row[key + 1] * row_bytes;
      prefetch(key, key + 2);
      float* to = b + key / 2 * kWidth;
#pragma GCC unroll 2
      for (int chunk = 0; chunk < kWidth / 64; ++chunk) {
        const VecI x = load_words(even + 32 * chunk), y = load_words(odd + 32 * chunk);
        const VecI pairs[2] = {_mm256_unpacklo_epi8(x, y), _mm256_unpackhi_epi8(x, y)};  // a byte of either key
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i, to += 16) {
          VecI first, last;
          level(i % 2 ? _mm256_srli_epi32(pairs[i / 2], 4) : pairs[i / 2], first, last);
          store_words(to, first);
          store_words(to + 8, last);
        }
      }
    }
  }
  static constexpr int dim_of(int position) {
    const int lane = position % 8, last = position / 8 % 2, nibble = position / 16 % 2, half = position / 32 % 2;
    const int byte = 16 * (lane / 4) + 8 * half + 4 * last + lane % 4;
    return position / 64 * 64 + 2 * byte + nibble;
  }
#endif

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
    int16_t rounded[kWidth], pairs[kWidth];
    for (int i = 0; i < kWidth; i += kLanes) store_int16(rounded + i, mul(load(q + i), set1(to_int)));
    for (int i = 0; i < kWidth / 2; ++i) {
      const int dim = i / 4 * 8 + first_of_pair(i % 4);
      pairs[2 * i] = rounded[dim];
      pairs[2 * i + 1] = rounded[dim + kPairStep];
    }
    std::memcpy(words, pairs, sizeof pairs);
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
