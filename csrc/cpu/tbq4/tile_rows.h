// Where the codes, norms and key offsets of one 64-key tile lie in the planes.
#pragma once
#include "cpu/attention/finish.h"

namespace flashq::FLASHQ_ISA {
namespace {

// Norms and offsets are only read for keys that some row reads from the codes; of the other keys of a tile, codes of
// rows that exist are read, and no score or weight depends on them.
struct TileRows {
  int64_t first_key;
  uint64_t needed;      // keys that some row reads from the codes
  int64_t row[kTileK];  // of the planes, that is of (pages, kv_heads, page_size)
  bool contiguous;      // row[i] == row[0] + i
  int runs;             // of keys in one page, at least one of them needed
  struct Run {
    int begin, end;
    int64_t page;
  } run[kTileK];
};

// The pages of one sequence and KV head.
class CodePages {
 public:
  FLASHQ_SIMD CodePages(const Tbq4View& kv, int64_t sequence, int64_t kv_head, int64_t kv_heads)
      : kv_(kv), sequence_(sequence), kv_head_(kv_head), kv_heads_(kv_heads) {
    const int64_t n = kv.page_size;
    if (n > 0 && (n & (n - 1)) == 0) shift_ = __builtin_ctzll(static_cast<uint64_t>(n));
  }

  // `needed` is not 0. Only table entries of needed keys are read.
  FLASHQ_SIMD void locate(int64_t first_key, uint64_t needed, TileRows& tile) const {
    tile.first_key = first_key;
    tile.needed = needed;
    tile.runs = 0;
    int64_t spare = 0;
    int missing = 0;  // keys without a row so far, all at the front or after the last run
    int64_t entry = shift_ >= 0 ? first_key >> shift_ : first_key / kv_.page_size;
    int64_t slot = first_key - entry * kv_.page_size;
    for (int begin = 0, end; begin < kTileK; begin = end, slot = 0, ++entry) {
      end = static_cast<int>(min_of<int64_t>(kTileK, begin + kv_.page_size - slot));
      const uint64_t of_page = tile_bits({begin, end}, 0);
      if (!(needed & of_page)) {
        for (int i = begin; i < end; ++i) tile.row[i] = -1;
        missing += end - begin;
        continue;
      }
      const int64_t page = kv_.block_table.given() ? kv_.block_table(sequence_, entry) : sequence_;
      const int64_t row = (page * kv_heads_ + kv_head_) * kv_.page_size + slot;
      for (int i = begin; i < end; ++i) tile.row[i] = row + (i - begin);
      tile.run[tile.runs++] = {begin, end, page};
      spare = row;
    }
    tile.contiguous = tile.runs == 1 && missing == 0;
    if (missing)
      for (int i = 0; i < kTileK; ++i)
        if (tile.row[i] < 0) tile.row[i] = spare;
  }

  FLASHQ_SIMD const Fp16* offset(int64_t page) const {
    return reinterpret_cast<const Fp16*>(kv_.k_offsets) + page * kv_.k_offsets_stride[0] +
           kv_head_ * kv_.k_offsets_stride[1];
  }

 private:
  const Tbq4View& kv_;
  int64_t sequence_, kv_head_, kv_heads_;
  int shift_ = -1;  // page_size is 2^shift, or -1
};

// Norms of block `block` of the tile's keys, 0 for keys that are not needed, whatever lies there. An infinite norm
// becomes NaN: its decoded block is +-Inf, and what a sum of those gives is NaN or hangs on the order of additions.
template <int kBlocks>
FLASHQ_SIMD void load_norms(const uint16_t* plane, const TileRows& tile, int block, float (&norms)[kTileK]) {
  uint16_t gathered[kTileK];
  const uint16_t* from = plane + tile.row[0];
  if (kBlocks > 1 || !tile.contiguous) {
    for (int i = 0; i < kTileK; ++i) gathered[i] = plane[tile.row[i] * kBlocks + block];
    from = gathered;
  }
  for (int i = 0; i < kTileK; i += kLanes) {
    const VecF x = keep_bits(widen(reinterpret_cast<const Fp16*>(from + i)), tile.needed >> i, zero());
    store(norms + i, add(x, sub(x, x)));
  }
}

}  // namespace
}  // namespace flashq::FLASHQ_ISA
