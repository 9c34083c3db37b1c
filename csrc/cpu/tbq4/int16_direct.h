// TBQ4 products in int16 on AVX2: codes are looked up into registers and meet all rows of a group there; only sums go
// through memory. On 2 Zen 3 cores, 32768 keys, D 128, 4 rows, expanding a tile first takes 1.2 to 1.3 times as long.
#pragma once
#include "cpu/tbq4/int16_operands.h"

#if defined(__AVX2__) && !defined(__AVX512F__)

namespace flashq::FLASHQ_ISA {
namespace {

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

// Looks 64 nibbles up: 4 vectors of 16 values, of the low nibbles of each half's first 8 bytes, of its last 8 bytes,
// and the same of the high nibbles.
struct ByteLevels {
  VecI low = load_words(kLevelBytes.low), high = load_words(kLevelBytes.high), nibble = _mm256_set1_epi8(15);

  FLASHQ_SIMD void operator()(VecI codes, VecI* values) const {
#pragma GCC unroll 2
    for (int n = 0; n < 2; ++n) {
      const VecI i = _mm256_and_si256(shift_right(codes, 4 * n), nibble);
      const VecI l = _mm256_shuffle_epi8(low, i), h = _mm256_shuffle_epi8(high, i);
      values[2 * n] = _mm256_unpacklo_epi8(l, h);
      values[2 * n + 1] = _mm256_unpackhi_epi8(l, h);
    }
  }
};

// The dim of value i of a row looked up 32 bytes after 32 bytes.
constexpr int direct_query_dim(int i) {
  const int byte = 16 * (i / 8 % 2) + 8 * (i / 16 % 2) + i % 8;
  return i / 64 * 64 + 2 * byte + i / 32 % 2;
}

template <int kWidth> struct DirectInt16 : Int16Operands<kWidth, direct_query_dim> {
  static constexpr int kVectors = kWidth / 16;  // of a row of values
  static constexpr int kWordsQ = kWidth / 2, kWordsP = kTileK / 2;

  // Scores of kRows rows, times row_factor (rows) and the keys' norms; `on_top`: added to those of the blocks before.
  template <int kRows, class Prefetch>
  [[gnu::noinline]] static void scores(const float* q, const uint8_t* codes, int64_t row_bytes, const TileRows& tile,
                                       float* s, const float* row_factor, const float* norms, bool on_top,
                                       const Prefetch& prefetch) {
    const ByteLevels level;
    for (int key = 0; key < kTileK; key += 8) {
      VecI dot[kRows][8];
      for (int t = 0; t < 8; ++t) {
        const uint8_t* from = codes + tile.row[key + t] * row_bytes;
        prefetch(key + t, key + t + 1);
        VecI value[kVectors];
#pragma GCC unroll 2
        for (int i = 0; i < kVectors; i += 4) level(load_words(from + 8 * i), value + i);
#pragma GCC unroll 8
        for (int r = 0; r < kRows; ++r) {
          const float* words = q + r * kWordsQ;
          VecI sum = _mm256_madd_epi16(value[0], load_words(words));
#pragma GCC unroll 8
          for (int i = 1; i < kVectors; ++i)
            sum = _mm256_add_epi32(sum, _mm256_madd_epi16(value[i], load_words(words + 8 * i)));
          dot[r][t] = sum;
        }
      }
      const VecF norm = load(norms + key);
      for (int r = 0; r < kRows; ++r) {
        const VecF x = mul(mul(to_float(sum_each(dot[r])), set1(row_factor[r])), norm);
        float* to = s + r * kTileK + key;
        store(to, on_top ? add(load(to), x) : x);
      }
    }
  }

  // acc (rows, acc_stride) += weights (rows, 64 keys) times values, times row_factor (rows). `sums` (rows, kWidth).
  template <int kRows, class Prefetch>
  [[gnu::noinline]] static void accumulate(const float* weights, const uint8_t* codes, int64_t row_bytes,
                                           const TileRows& tile, float* sums, float* acc, int64_t acc_stride,
                                           const float* row_factor, const Prefetch& prefetch) {
    const ByteLevels level;
    std::memset(sums, 0, static_cast<size_t>(kRows) * kWidth * sizeof(float));
    for (int key = 0; key < kTileK; key += 4) {
      const uint8_t* from[4];
#pragma GCC unroll 4
      for (int t = 0; t < 4; ++t) from[t] = codes + tile.row[key + t] * row_bytes;
      prefetch(key, key + 4);
#pragma GCC unroll 1
      for (int at = 0; at < kWidth / 2; at += 32) {
        VecI x[4];
#pragma GCC unroll 4
        for (int t = 0; t < 4; ++t) x[t] = load_words(from[t] + at);
#pragma GCC unroll 1
        for (int half = 0; half < 2; ++half) {
          VecI first[4], second[4];  // of two keys each, side by side
          level(half ? _mm256_unpackhi_epi8(x[0], x[1]) : _mm256_unpacklo_epi8(x[0], x[1]), first);
          level(half ? _mm256_unpackhi_epi8(x[2], x[3]) : _mm256_unpacklo_epi8(x[2], x[3]), second);
          float* to = sums + 2 * at + 32 * half;
          const float* weight = weights + key / 2;
#pragma GCC unroll 8
          for (int r = 0; r < kRows; ++r, to += kWidth, weight += kWordsP) {
            const VecI a = as_words(set1(weight[0])), b = as_words(set1(weight[1]));
#pragma GCC unroll 4
            for (int i = 0; i < 4; ++i) {
              const VecI sum = _mm256_add_epi32(_mm256_madd_epi16(first[i], a), _mm256_madd_epi16(second[i], b));
              store_words(to + 8 * i, _mm256_add_epi32(sum, load_words(to + 8 * i)));
            }
          }
        }
      }
    }
    for (int r = 0; r < kRows; ++r)
      for (int i = 0; i < kWidth; i += kLanes) {
        float* to = acc + r * acc_stride + i;
        store(to, add(load(to), mul(to_float(load_words(sums + r * kWidth + i)), set1(row_factor[r]))));
      }
  }

  static constexpr int dim_of(int position) {
    const int lane = position % 8, last = position / 8 % 2, nibble = position / 16 % 2, half = position / 32 % 2;
    const int byte = 16 * (lane / 4) + 8 * half + 4 * last + lane % 4;
    return position / 64 * 64 + 2 * byte + nibble;
  }

 private:
  // Lane i of the result is the sum of the lanes of v[i].
  FLASHQ_SIMD static VecI sum_each(const VecI (&v)[8]) {
    const VecI a = _mm256_hadd_epi32(_mm256_hadd_epi32(v[0], v[1]), _mm256_hadd_epi32(v[2], v[3]));
    const VecI b = _mm256_hadd_epi32(_mm256_hadd_epi32(v[4], v[5]), _mm256_hadd_epi32(v[6], v[7]));
    return _mm256_add_epi32(_mm256_permute2x128_si256(a, b, 0x20), _mm256_permute2x128_si256(a, b, 0x31));
  }
};

}  // namespace
}  // namespace flashq::FLASHQ_ISA

#endif
