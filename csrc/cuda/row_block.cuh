// What one block of threads works on: a tile of rows of a sequence and KV head, and the keys that they see.
//
// It stands in shared memory: only the ends of a kernel need it, and masked tiles, while the main loop is short of
// registers.
#pragma once
#include "cuda/finish_row.cuh"
#include "cuda/sequences.cuh"
#include "cuda/tile_copy.cuh"

namespace flashq::cuda {

struct RowBlock {
  Sequence sequence;
  int64_t kv_head, group, first_row, first_query, last_query;
  int rows;
  KeyRange seen;               // by some row
  int64_t first_key;           // of the first tile of keys, a multiple of its size
  int tile_keys, tiles;        // keys of a tile; tiles
  int clear_begin, clear_end;  // tiles [clear_begin, clear_end) that all rows see whole

  // All lanes of a warp call it with the same arguments.
  __device__ __forceinline__ RowBlock(const Attention16Params& p, const RowTile& at, int64_t kv_head, int tile_rows,
                                      int tile_keys)
      : sequence(at.sequence),
        kv_head(kv_head),
        group(divide(p.query.q_heads, p.query.kv_heads).quotient),
        first_row(at.first_row),
        tile_keys(tile_keys) {
    const Mask& mask = sequence.mask;
    rows = static_cast<int>(min_of<int64_t>(tile_rows, mask.q_len * group - first_row));
    first_query = divide(first_row, group).quotient;
    last_query = divide(first_row + rows - 1, group).quotient;
    seen = mask.visible(first_query, last_query);
    first_key = seen.begin / tile_keys * tile_keys;
    tiles = seen.empty() ? 0 : static_cast<int>(ceil_div(seen.end - first_key, tile_keys));
    const KeyRange by_all{mask.visible(last_query).begin, mask.visible(first_query).end};
    const int64_t begin = ceil_div(max_of(by_all.begin - first_key, int64_t{0}), tile_keys);
    const int64_t end = max_of(by_all.end - first_key, int64_t{0}) / tile_keys;
    clear_begin = static_cast<int>(min_of<int64_t>(begin, tiles));
    clear_end = static_cast<int>(min_of<int64_t>(end, tiles));
  }

  // Into how many splits, of `most`, the tiles of keys fall. Splits of fewer keys would cost more than they save.
  static constexpr int kLeastSplitTiles = 16;
  __device__ __forceinline__ int split_tiles(int most) const {
    return max_of((tiles + most - 1) / most, kLeastSplitTiles);
  }
  __device__ __forceinline__ int split_count(int most) const {
    if (tiles <= kLeastSplitTiles || most == 1) return 1;
    const int size = split_tiles(most);
    return (tiles + size - 1) / size;
  }
  // Keeps the tiles of one split, which may be none.
  __device__ __forceinline__ void take_split(int split, int most) {
    const int size = split_tiles(most), first = min_of(split * size, tiles);
    first_key += int64_t{first} * tile_keys;
    tiles = min_of(size, tiles - first);
    clear_begin = max_of(clear_begin - first, 0);
    clear_end -= first;
  }

  // Counted from the block's first query, and within the group. Rows past the last one are like the last one.
  __device__ __forceinline__ RowPlace place(int row) const {
    const Quotient at = divide(first_row + min_of(row, rows - 1), group);
    return {static_cast<int>(at.quotient - first_query), static_cast<int>(at.remainder)};
  }
  __device__ __forceinline__ KeyRange visible(RowPlace place) const {
    return sequence.mask.visible(first_query + place.query);
  }
  // Elements from the base to a row of q, out or lse.
  __device__ __forceinline__ int64_t offset(RowPlace place, int64_t batch_stride, int64_t token_stride,
                                            int64_t head_stride) const {
    return sequence.batch * batch_stride + (sequence.q_begin + first_query + place.query) * token_stride +
           (kv_head * group + place.head) * head_stride;
  }
};

// Copies rows of a warp, 16 bytes a lane: `copy(row, chunk, offset)`. `offset` is that of row `lane`; asking for those
// of other rows here, instead of working them out again, saves two thirds of the instructions.
template <int kDim, int kRows, class Copy> __device__ __forceinline__ void copy_warp_rows(int64_t offset, Copy copy) {
  constexpr int kChunks = SharedTile<kDim>::kChunks, kStep = 32 / kChunks;
  const int lane = static_cast<int>(threadIdx.x) % 32, chunk = lane % kChunks;
#pragma unroll 4
  for (int i = 0; i < kRows / kStep; ++i) {
    const int row = i * kStep + lane / kChunks;
    copy(row, chunk, __shfl_sync(~0u, offset, row) + chunk * 8);
  }
}

// A warp's queries, rows [warp_row, warp_row + kRows) of the tile (kTileQ, kDim); zeros in rows past the last one.
template <int kDim, int kRows, bool kNarrow> __device__ __forceinline__ void load_queries(
    uint32_t tile, const QueryView& q, const RowBlock& block, RowPlace place, int warp_row, bool narrow) {
  const int64_t own = block.offset(place, q.q_stride[0], q.q_stride[1], q.q_stride[2]);
  copy_warp_rows<kDim, kRows>(own, [&](int row, int chunk, int64_t at) {
    const auto* from = static_cast<const uint16_t*>(q.q) + at;
    const bool wanted = warp_row + row < block.rows && chunk * 8 < q.head_dim;
    const uint32_t to = tile + SharedTile<kDim>::offset(warp_row + row, chunk);
    if (kNarrow && narrow)
      copy_chunk_narrow(to, from, wanted);
    else
      ptx::cp_async_16(to, from, wanted);
  });
}

}  // namespace flashq::cuda
