// The constants of the TBQ4 format (docs/tbq4_format.md): every table once.
//
// Namespace-scope tables are `constexpr` without `inline`: internal linkage, so that no object carries a weak copy.
// CUDA device code copies a table into a local `constexpr auto` to index it with a variable.
#pragma once
#include "core/portability.h"

namespace flashq::tbq4 {

constexpr int kLevels = 16;
constexpr int kMagnitudes = kLevels / 2;  // the levels are symmetric about 0
constexpr int kEdges = kMagnitudes - 1;   // positive edges; their negatives and 0 are the other eight

// Elements of a block: 64 for head_dim 64, 128 for 128 and 256; 0: the format has no such head_dim.
FLASHQ_HD constexpr int block_width(int64_t head_dim) {
  return head_dim == 64 ? 64 : head_dim == 128 || head_dim == 256 ? 128 : 0;
}
FLASHQ_HD constexpr int64_t blocks_per_row(int64_t head_dim) { return head_dim / block_width(head_dim); }

template <class T, int N> struct Table {
  T value[N];
  FLASHQ_HD constexpr T operator[](int i) const { return value[i]; }
};

// Level 0 is the most negative, 15 the most positive. Lloyd-Max of N(0, 1/128); for 64 the same times sqrt(2).
constexpr Table<float, kLevels> kCentroids128{{-.241556f, -.182907f, -.143047f, -.111065f, -.083317f, -.058069f,
                                               -.034311f, -.011353f, .011353f, .034311f, .058069f, .083317f, .111065f,
                                               .143047f, .182907f, .241556f}};
constexpr Table<float, kLevels> kCentroids64{{-.34161177f, -.25866956f, -.20229901f, -.15706962f, -.11782803f,
                                              -.08212197f, -.048523083f, -.016055567f, .016055567f, .048523083f,
                                              .08212197f, .11782803f, .15706962f, .20229901f, .25866956f, .34161177f}};
template <int kWidth> FLASHQ_HD constexpr float centroid(int index) {
  static_assert(kWidth == 64 || kWidth == 128);
  constexpr auto table = kWidth == 64 ? kCentroids64 : kCentroids128;
  return table[index];
}

// Edges between levels, for the un-normalised transform of a vector of length 1: midpoints * sqrt(128), either width.
constexpr Table<float, kEdges> kPositiveEdges{
    {0x1.0883a0p-2f, 0x1.0b8fa2p-1f, 0x1.997f62p-1f, 0x1.197ec6p+0f, 0x1.6ffe56p+0f, 0x1.d80824p+0f, 0x1.335842p+1f}};

// Squares of the magnitudes, round(c128^2 * 2^28): the length of the decoded vector in integers, in any order of
// addition.
constexpr Table<int32_t, kMagnitudes> kSquares{{34599, 316014, 905167, 1863404, 3311268, 5492846, 8980500, 15663022}};
template <int kWidth> constexpr float kSquaresScale = kWidth == 64 ? 0x1p-27f : 0x1p-28f;

template <int kWidth> constexpr float kInvSqrtWidth = kWidth == 64 ? 0.125f : 0x1.6a09e6p-4f;

// Sign vectors, bit i of word w: element 32 w + i is negated. Width 64 uses the first two words.
using SignMask = Table<uint32_t, 4>;
constexpr SignMask kSignIn{{0xE46A0359, 0x42F85949, 0xA4C63BBB, 0x49F250A9}};   // s1, before the transform
constexpr SignMask kSignOut{{0x16ACEE90, 0x3F628FDC, 0xB7A5357A, 0xBEA56562}};  // s2, after it

constexpr float kTiny = 1e-10f;  // a block of this length or less is a block of zeros
constexpr float kHalfMax = 65504.f;
constexpr uint16_t kPoisonNorm = 0x7E00;  // the norm of a block with a NaN or Inf in it
constexpr uint8_t kZeroCodes = 0x88;      // two codes of a block of zeros

// SHA-256 of the tables, first 16 digits: stored beside saved caches. Tests recompute it.
constexpr char kFingerprint[] = "dbe9ab17e320d84f";

}  // namespace flashq::tbq4
