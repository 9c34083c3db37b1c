// Attention for many rows: a block of rows of one KV head meets 64-key tiles that are first packed to the form that a
// register-tiled product reads. Packing a tile costs about what 8 rows do, so it is repeated for every block of rows
// and no packed copy of K and V exists.
//
// A word is 32 bits: one fp32, or two bf16 (simd.h). With W words a row of q or k:
//   q       (rows, padded W)                  rows as they come
//   K tile  (padded W, kTileK)                transposed, so that lanes are keys
//   P       (kRows, kTileK / kPerWord)
//   V tile  (kTileK / kPerWord, width)        a word holds the kPerWord keys that share it
// Both products are then the same routine: C[rows][n] += A[rows][words] * B[words][n].
#pragma once
#include "cpu/attention/key_rows.h"

namespace flashq::FLASHQ_ISA {
namespace {

constexpr int kRows = 6;  // register tile: 6 rows x kVecs vectors, 24 of 32 zmm or 12 of 16
constexpr int kVecs = kLanes == 16 ? 4 : 2;
constexpr int kCols = kVecs * kLanes;
constexpr int64_t kBlockRows = 192;                // rows of a unit at most
constexpr int64_t kChain = kLanes == 4 ? 16 : 32;  // words of a score added up in one go; without FMA each rounds twice
static_assert(kTileK % kCols == 0 && kBlockRows % kRows == 0);

// c[kRows][kColVecs vectors] (+)= a[kRows][words] * b[words][...]. The sum over `words` starts from 0 and is added to c
// last: short chains of additions round less.
template <class Words, bool kAccumulate, int kColVecs>
[[gnu::noinline]] void multiply(const float* a, int64_t lda, const float* b, int64_t ldb, int64_t words, float* c,
                                int64_t ldc) {
  VecF acc[kRows][kColVecs];
#pragma GCC unroll 6
  for (int i = 0; i < kRows; ++i)
#pragma GCC unroll 4
    for (int j = 0; j < kColVecs; ++j) acc[i][j] = zero();
#pragma GCC unroll 2
  for (int64_t w = 0; w < words; ++w) {
    VecF bv[kColVecs];
#pragma GCC unroll 4
    for (int j = 0; j < kColVecs; ++j) bv[j] = load(b + w * ldb + j * kLanes);
#pragma GCC unroll 6
    for (int i = 0; i < kRows; ++i) {
      const VecF av = set1(a[i * lda + w]);
#pragma GCC unroll 4
      for (int j = 0; j < kColVecs; ++j) acc[i][j] = Words::mac(acc[i][j], av, bv[j]);
    }
  }
#pragma GCC unroll 6
  for (int i = 0; i < kRows; ++i)
#pragma GCC unroll 4
    for (int j = 0; j < kColVecs; ++j) {
      float* to = c + i * ldc + j * kLanes;
      store(to, kAccumulate ? add(load(to), acc[i][j]) : acc[i][j]);
    }
}

// The same for any number of columns, a multiple of kLanes.
template <class Words, bool kAccumulate>
FLASHQ_SIMD void multiply_columns(const float* a, int64_t lda, const float* b, int64_t ldb, int64_t words, float* c,
                                  int64_t ldc, int64_t columns) {
  int64_t n = 0;
  for (; n + kCols <= columns; n += kCols) multiply<Words, kAccumulate, kVecs>(a, lda, b + n, ldb, words, c + n, ldc);
  if constexpr (kVecs == 4)
    if (n + 2 * kLanes <= columns) {
      multiply<Words, kAccumulate, 2>(a, lda, b + n, ldb, words, c + n, ldc);
      n += 2 * kLanes;
    }
  if (n < columns) multiply<Words, kAccumulate, 1>(a, lda, b + n, ldb, words, c + n, ldc);
}

// Packs 64 rows of keys: to[word][key]. `to` has round_up(words, kLanes) rows of kTileK.
template <class Words, class T> FLASHQ_SIMD void pack_keys(const T* const (&rows)[kTileK], int64_t words, float* to) {
  for (int key = 0; key < kTileK; key += kLanes)
    for (int64_t word = 0; word < words; word += kLanes) {
      VecI r[kLanes];
#pragma GCC unroll 16
      for (int i = 0; i < kLanes; ++i) r[i] = Words::load_row_n(rows[key + i], word, words - word);
      transpose(r);
#pragma GCC unroll 16
      for (int i = 0; i < kLanes; ++i) store_words(to + (word + i) * kTileK + key, r[i]);
    }
}

// Packs 64 rows of values: to[key / kPerWord][dim]. Columns from `dim` to the next multiple of kLanes become 0.
template <class Words, class T>
FLASHQ_SIMD void pack_values(const T* const (&rows)[kTileK], int64_t dim, float* to, int64_t width) {
  for (int w = 0; w < kTileK / Words::kPerWord; ++w) {
    const T *a = rows[w * Words::kPerWord], *b = rows[w * Words::kPerWord + Words::kPerWord - 1];
    for (int64_t d = 0; d < dim; d += kLanes) store_words(to + w * width + d, Words::load_pair_n(a, b, d, dim - d));
  }
}

// The state of a block of rows and the loop over tiles. What tiles are made of is the Source's business:
//   uint64_t bits(int64_t query, int64_t first_key)      the keys of the tile that a query reads
//   uint64_t readable(int64_t first_key)                 those that some query of the sequence reads
//   void pack(int64_t first_key, uint64_t readable, float* k, float* v)   packed forms; zeros for other keys
// A tile is packed for the whole sequence, not for the block's own rows: a NaN in a value also reaches rows of a stripe
// that mask its key, and which rows those are must not depend on how the sequence is cut into blocks.
template <class Words> class PackedBlock {
 public:
  static constexpr int kWordsP = kTileK / Words::kPerWord;

  static constexpr int64_t scratch_bytes(int64_t rows, int64_t head_dim) {
    const int64_t words = round_up(head_dim / Words::kPerWord, kLanes), width = cpu::padded_dim(head_dim);
    const int64_t padded = round_up(rows, kRows);
    const int64_t floats = padded * (words + width) + kTileK * (words + width) + kRows * 2 * kTileK;
    return floats * 4 + round_up(padded * int64_t{sizeof(RowState)}, 64) + round_up(padded * 8, 64);
  }

  // Rows start empty, with zero queries. The block of `capacity` rows has scratch_bytes(capacity) at `scratch`.
  FLASHQ_SIMD PackedBlock(std::byte* scratch, int64_t rows, int64_t head_dim)
      : rows_(rows),
        padded_rows_(round_up(rows, kRows)),
        head_dim_(head_dim),
        words_(head_dim / Words::kPerWord),
        padded_words_(round_up(words_, kLanes)),
        width_(cpu::padded_dim(head_dim)) {
    k_ = reinterpret_cast<float*>(scratch);
    v_ = k_ + kTileK * padded_words_;
    s_ = v_ + kTileK * width_;
    p_ = s_ + kRows * kTileK;
    q_ = p_ + kRows * kTileK;
    acc_ = q_ + padded_rows_ * padded_words_;
    state_ = reinterpret_cast<RowState*>(acc_ + padded_rows_ * width_);
    bits_ = reinterpret_cast<uint64_t*>(reinterpret_cast<std::byte*>(state_) +
                                        round_up(padded_rows_ * int64_t{sizeof(RowState)}, 64));
    std::memset(acc_, 0, static_cast<size_t>(padded_rows_ * width_) * sizeof(float));
    for (int64_t r = 0; r < padded_rows_; ++r) {
      state_[r] = empty_row();
      bits_[r] = 0;
    }
    std::memset(q_ + rows_ * padded_words_, 0,
                static_cast<size_t>((padded_rows_ - rows_) * padded_words_) * sizeof(float));
    // Columns that pad the width are multiplied too: a NaN left there would be slow to carry along.
    std::memset(v_, 0, static_cast<size_t>(kTileK * width_) * sizeof(float));
  }

  template <class T> FLASHQ_SIMD void load_query(int64_t row, const T* from) {
    for (int64_t w = 0; w < words_; w += kLanes)
      store_words(q_ + row * padded_words_ + w, Words::load_row_n(from, w, words_ - w));
  }
  FLASHQ_SIMD float* query(int64_t row) { return q_ + row * padded_words_; }  // words
  FLASHQ_SIMD float* acc(int64_t row) { return acc_ + row * width_; }
  FLASHQ_SIMD UnitRows rows() const { return {acc_, state_, padded_rows_}; }

  // Goes through the tiles of `keys`. The block's first row is row `first_row` of its (sequence, KV head).
  template <int kExp2Degree, class Source>
  FLASHQ_SIMD void attend(KeyRange keys, int64_t first_row, int64_t group, const ScoreRule& rule, Source& source) {
    if (keys.empty()) return;
    for (int64_t first_key = keys.begin / kTileK * kTileK; first_key < keys.end; first_key += kTileK) {
      const uint64_t within = tile_bits(keys, first_key);
      uint64_t any = 0;
      for (int64_t r = 0; r < rows_; ++r) {
        const int64_t row = first_row + r;
        bits_[r] = r > 0 && row % group != 0 ? bits_[r - 1] : source.bits(row / group, first_key) & within;
        any |= bits_[r];
      }
      if (any == 0) continue;
      source.pack(first_key, source.readable(first_key), k_, v_);
      for (int64_t r = 0; r < padded_rows_; r += kRows) {
        uint64_t seen = 0;
        for (int i = 0; i < kRows; ++i) seen |= bits_[r + i];
        if (seen) stripe<kExp2Degree>(r, rule);
      }
    }
  }

 private:
  template <int kExp2Degree> FLASHQ_SIMD void stripe(int64_t r, const ScoreRule& rule) {
    const float* q = q_ + r * padded_words_;
    multiply_columns<Words, false>(q, padded_words_, k_, kTileK, min_of(words_, kChain), s_, kTileK, kTileK);
    for (int64_t w = kChain; w < words_; w += kChain)
      multiply_columns<Words, true>(q + w, padded_words_, k_ + w * kTileK, kTileK, min_of(words_ - w, kChain), s_,
                                    kTileK, kTileK);
    for (int i = 0; i < kRows; ++i) {
      VecF x[kN];
      if (bits_[r + i] == 0) {  // also of padding rows
        for (int j = 0; j < kN; ++j) x[j] = zero();
      } else {
        softmax_row<kExp2Degree>(s_ + i * kTileK, nullptr, bits_[r + i], rule, state_[r + i], acc(r + i), width_, x);
      }
      Words::store_p(p_ + i * kWordsP, x);
    }
    multiply_columns<Words, true>(p_, kWordsP, v_, width_, kWordsP, acc(r), width_, round_up(head_dim_, kLanes));
  }

  int64_t rows_, padded_rows_, head_dim_, words_, padded_words_, width_;
  float *k_, *v_, *s_, *p_, *q_, *acc_;
  RowState* state_;
  uint64_t* bits_;  // of the current tile, by row
};

}  // namespace
}  // namespace flashq::FLASHQ_ISA
