// A tile of codes: what a warp loads and computes at a time, and how it lies in shared memory.
//
// 2048 bytes of K codes, 2048 of V codes and their norms, in the order of memory. A lane (g = lane / 4, t = lane % 4)
// owns, as a row of K, the tokens of piece tau(g) of eight: kPerLane in a row. As columns of V^T it owns those of the
// pieces t and t + 4. Both kinds of reads are free of bank conflicts, because bits of the piece's number are added to
// bits 5 and 6 of the address.
#pragma once
#include "core/portability.h"
#include "core/tbq4/codebook.h"

namespace flashq::cuda {

template <int D> struct CodeTile {
  static constexpr int kWidth = tbq4::block_width(D);
  static constexpr int kBlocks = D / kWidth;  // norms of a token
  static constexpr int kBytes = 2048;         // codes of K, or of V
  static constexpr int kTokenBytes = D / 2;
  static constexpr int kTokens = kBytes / kTokenBytes;  // 64, 32, 16
  static constexpr int kPerLane = kTokens / 8;
  static constexpr int kNormBytes = kTokens * kBlocks * 2;
  static constexpr int kSlotBytes = 2 * kBytes + 2 * kNormBytes;  // a multiple of 128
  static constexpr int kProducts = D == 64 ? 4 : 2;  // of 16 rows: groups of tokens, or the blocks of 16 tokens
  static constexpr int kGroups = kTokens / 16;       // of 16 scores of a row
  static constexpr int kSteps = kWidth / 16;         // of 16 dims: products of a block
  static constexpr int kWords = kWidth / 32;         // of 8 codes, that a lane reads of a block of K

  // Where byte `at` of a tile stands.
  static FLASHQ_HD constexpr uint32_t swizzle(uint32_t at) {
    return at ^ (at >> 8 & 1) << 5 ^ ((at >> 9 ^ at >> 10) & 1) << 6;
  }
  // The piece whose tokens a lane's rows of K are.
  static FLASHQ_HD constexpr int piece(int g) { return (g >> 1) + 4 * (g & 1); }

  // Offset, from the lane's first byte, of row g + 8 h of product j, in the bits that swizzle() leaves alone, and in
  // those that have to be exchanged (^).
  static FLASHQ_HD constexpr uint32_t above(int j, int h) {
    return D == 64 ? (j >> 1) * 128 : D == 128 ? j * 128 : h * 128;
  }
  static FLASHQ_HD constexpr uint32_t within(int j, int h) {
    return D == 64 ? (j & 1) * 64 + h * 32 : D == 128 ? h * 64 : j * 64;
  }
};

}  // namespace flashq::cuda
