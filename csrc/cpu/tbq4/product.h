// The register-tiled product that serves both scores and outputs of a 64-key tile.
#pragma once
#include "cpu/simd/simd.h"

namespace flashq::FLASHQ_ISA {
namespace {

constexpr int kProductRows = 6;  // 6 x 4 of 32 zmm, or 6 x 2 of 16 narrower registers
constexpr int product_vectors(int rows) { return kLanes == 16 ? 4 : rows == 1 ? 8 : rows == 2 ? 4 : 2; }

// What becomes of a sum: c[row][column] (+)= sum * row_factor[row] * column_factor[column].
struct Fold {
  float* c;  // (rows, ldc)
  int64_t ldc;
  const float* row_factor;     // (rows)
  const float* column_factor;  // (columns), or null: 1
  bool add;
};

// a (kRows, words), rows lda apart, times b (words, kVectors vectors), rows ldb apart.
template <class Math, int kRows>
[[gnu::noinline]] void multiply_codes(const float* a, int64_t lda, const float* b, int64_t ldb, int64_t words,
                                      const Fold& fold) {
  constexpr int kVectors = product_vectors(kRows);
  typename Math::Acc sum[kRows][kVectors];
#pragma GCC unroll 6
  for (int i = 0; i < kRows; ++i)
#pragma GCC unroll 8
    for (int j = 0; j < kVectors; ++j) sum[i][j] = Math::nothing();
#pragma GCC unroll 2
  for (int64_t w = 0; w < words; ++w) {
    VecI column[kVectors];
#pragma GCC unroll 8
    for (int j = 0; j < kVectors; ++j) column[j] = load_words(b + w * ldb + j * kLanes);
#pragma GCC unroll 6
    for (int i = 0; i < kRows; ++i)
#pragma GCC unroll 8
      for (int j = 0; j < kVectors; ++j) sum[i][j] = Math::mac(sum[i][j], column[j], a + i * lda + w);
  }
#pragma GCC unroll 6
  for (int i = 0; i < kRows; ++i) {
    const VecF row_factor = set1(fold.row_factor[i]);
#pragma GCC unroll 8
    for (int j = 0; j < kVectors; ++j) {
      VecF x = mul(Math::value(sum[i][j]), row_factor);
      if (fold.column_factor) x = mul(x, load(fold.column_factor + j * kLanes));
      float* to = fold.c + i * fold.ldc + j * kLanes;
      store(to, fold.add ? add(load(to), x) : x);
    }
  }
}

template <class Math, int kRows>
FLASHQ_SIMD void multiply_code_columns(const float* a, int64_t lda, const float* b, int64_t words, int columns,
                                       Fold fold) {
  constexpr int kStep = product_vectors(kRows) * kLanes;
  for (int n = 0; n < columns; n += kStep, fold.c += kStep) {
    multiply_codes<Math, kRows>(a, lda, b + n, columns, words, fold);
    if (fold.column_factor) fold.column_factor += kStep;
  }
}

// The same for any number of rows. b is (words, columns); columns are a multiple of 64.
template <class Math>
FLASHQ_SIMD void multiply_code_rows(int64_t rows, const float* a, int64_t lda, const float* b, int64_t words,
                                    int columns, Fold fold) {
  while (rows > 0) {
    // 7 and 8 rows as 4 and the rest: 6 and 1 would read b once more for a single row.
    const int64_t n = rows == 7 || rows == 8 ? 4 : min_of<int64_t>(rows, kProductRows);
    switch (n) {
      case 1: multiply_code_columns<Math, 1>(a, lda, b, words, columns, fold); break;
      case 2: multiply_code_columns<Math, 2>(a, lda, b, words, columns, fold); break;
      case 3: multiply_code_columns<Math, 3>(a, lda, b, words, columns, fold); break;
      case 4: multiply_code_columns<Math, 4>(a, lda, b, words, columns, fold); break;
      case 5: multiply_code_columns<Math, 5>(a, lda, b, words, columns, fold); break;
      default: multiply_code_columns<Math, 6>(a, lda, b, words, columns, fold); break;
    }
    rows -= n;
    a += n * lda;
    fold.c += n * fold.ldc;
    fold.row_factor += n;
  }
}

}  // namespace
}  // namespace flashq::FLASHQ_ISA
