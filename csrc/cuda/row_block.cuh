// What one block of threads works on: a tile of rows of a sequence and KV head, and the keys that they see.
//
// It stands in shared memory: only the ends of a kernel need it, and masked tiles, while the main loop is short of
// registers.
#pragma once
#include "cuda/sequences.cuh"
#include "cuda/tile_copy.cuh"

namespace flashq::cuda {

struct RowPlace { int query, head; };  // counted from the block's first query, and within the group

struct RowBlock {
  Sequence sequence;
  int64_t kv_head, group, first_row, first_query, last_query;
  int rows;
  KeyRange seen;               // by some row
  int64_t first_key;           // of the first tile of keys, a multiple of its size
  int tiles;                   // of keys
  int clear_begin, clear_end;  // tiles [clear_begin, clear_end) that all rows see whole

  // All lanes of a warp call it with the same arguments.
  __device__ __forceinline__ RowBlock(const Attention16Params& p, const RowTile& at, int64_t kv_head, int tile_rows,
                                      int tile_keys)
      : sequence(at.sequence), kv_head(kv_head), group(p.query.q_heads / p.query.kv_heads), first_row(at.first_row) {
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

  // Fills `places`; rows past the last one are like the last one.
  __device__ __forceinline__ void place_rows(RowPlace* places, int count) const {
    for (int i = static_cast<int>(threadIdx.x); i < count; i += static_cast<int>(blockDim.x)) {
      const Quotient at = divide(first_row + min_of(i, rows - 1), group);
      places[i] = {static_cast<int>(at.quotient - first_query), static_cast<int>(at.remainder)};
    }
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

// The block's queries (kTileQ, kDim); zeros in rows past the last one.
template <int kDim, int kTileQ, int kThreads, bool kNarrow> __device__ __forceinline__ void load_queries(
    uint32_t tile, const QueryView& q, const RowBlock& block, const RowPlace* places, bool narrow) {
  const CopyLane<kDim, kThreads> lane;
#pragma unroll 4
  for (int row = lane.row; row < kTileQ; row += lane.kStep) {
    const int64_t at = block.offset(places[row], q.q_stride[0], q.q_stride[1], q.q_stride[2]) + lane.chunk * 8;
    const auto* from = static_cast<const uint16_t*>(q.q) + at;
    const bool wanted = row < block.rows && lane.chunk * 8 < q.head_dim;
    const uint32_t to = tile + SharedTile<kDim>::offset(row, lane.chunk);
    if (kNarrow && narrow)
      copy_chunk_narrow(to, from, wanted);
    else
      ptx::cp_async_16(to, from, wanted);
  }
}

}  // namespace flashq::cuda
