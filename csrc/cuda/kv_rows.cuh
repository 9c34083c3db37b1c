// Where a block's keys and values lie, and their way into shared memory, tile by tile.
#pragma once
#include "cuda/row_block.cuh"

namespace flashq::cuda {

// Page and slot of a key; page -1 where there is none.
struct KeySlot { int64_t page, slot; };

__device__ __forceinline__ KeySlot slot_of(const KvView& kv, const Sequence& s, int64_t key) {
  if (!kv.block_table.given()) return {kv.cu_seqlens_k.given() ? 0 : s.batch, s.k_begin + key};
  const Quotient at = divide(key, kv.page_size);
  const int64_t page = kv.block_table(s.batch, at.quotient);
  return {page >= 0 && page < kv.num_pages ? page : -1, at.remainder};
}
__device__ __forceinline__ int64_t offset_of(KeySlot at, const int64_t (&stride)[3], int64_t kv_head) {
  return at.page * stride[0] + at.slot * stride[1] + kv_head * stride[2];
}

// Both kinds below read no keys but the visible ones; others, and those on pages that do not exist, become zeros in
// shared memory: a weight of 0 times whatever lies there would be NaN.

// Keys in a row, at a fixed stride, with rows that 16-byte loads can read.
template <int kDim, int kTileK, int kThreads> struct DenseRows {
  struct State {
    const char *k, *v;  // the first tile
    int begin, end;     // visible keys of the first and of the last tile: [begin, kTileK), [0, end)
  };

  // Thread 0 calls it.
  __device__ static void prepare(State& state, const Attention16Params& p, const RowBlock& block) {
    const KvView& kv = p.kv;
    const KeySlot first = slot_of(kv, block.sequence, block.first_key);
    state.k = static_cast<const char*>(kv.k) + 2 * offset_of(first, kv.k_stride, block.kv_head);
    state.v = static_cast<const char*>(kv.v) + 2 * offset_of(first, kv.v_stride, block.kv_head);
    state.begin = range_in_tile(block.seen, block.first_key, kTileK).begin;
    state.end = range_in_tile(block.seen, block.first_key + int64_t{block.tiles - 1} * kTileK, kTileK).end;
  }
  // Starts the copy of a tile of keys or values.
  __device__ __forceinline__ static void load(uint32_t to, int tile, int tiles, bool values, const State& state,
                                              const Attention16Params& p) {
    const int64_t stride = 2 * (values ? p.kv.v_stride : p.kv.k_stride)[1];
    const char* from = (values ? state.v : state.k) + tile * (kTileK * stride);
    copy_rows<kDim, kTileK, kThreads>(to, from, stride,
                                      CopyLane<kDim, kThreads>(static_cast<int>(threadIdx.x)).chunk * 8 <
                                          p.query.head_dim,
                                      tile == 0 ? state.begin : 0, tile == tiles - 1 ? state.end : kTileK);
  }
};

// Keys anywhere, looked up one by one ahead of their copies: pages of any size, unaligned rows.
template <int kDim, int kTileK, int kThreads> struct ScatteredRows {
  static_assert(kTileK % 32 == 0 && kTileK <= kThreads);
  static constexpr int kWords = kTileK / 32;
  struct State {
    int64_t k[2][kTileK], v[2][kTileK];  // elements from the base to the keys of two tiles; -1: not there
    uint32_t found[3][kWords];           // bit i: key i is there, or not visible; of the tile in use, too
    uint32_t missing[kWords];            // complements of `found`, of all tiles
    bool narrow;                         // no 16-byte loads
  };

  // All threads call it: looks up the keys of a tile, for load() after the next barrier. Tile - 2 has been loaded.
  __device__ __forceinline__ static void find(State& state, int tile, const Attention16Params& p,
                                              const RowBlock& block) {
    const KvView& kv = p.kv;
    const int i = ptx::fresh_thread();
    if (i >= kTileK) return;
    const int64_t key = block.first_key + int64_t{tile} * kTileK + i;
    const bool wanted = key >= block.seen.begin && key < block.seen.end;
    const KeySlot slot = wanted ? slot_of(kv, block.sequence, key) : KeySlot{-1, 0};
    state.k[tile % 2][i] = slot.page < 0 ? -1 : offset_of(slot, kv.k_stride, block.kv_head);
    state.v[tile % 2][i] = slot.page < 0 ? -1 : offset_of(slot, kv.v_stride, block.kv_head);
    const uint32_t found = __ballot_sync(~0u, slot.page >= 0 || !wanted);
    if (i % 32 != 0) return;
    state.found[tile % 3][i / 32] = found;
    if (tile == 0) state.missing[i / 32] = 0;
    if (~found) state.missing[i / 32] |= ~found;
  }
  __device__ __forceinline__ static bool all_found(const uint32_t (&found)[kWords]) {
    uint32_t all = ~0u;
#pragma unroll
    for (int i = 0; i < kWords; ++i) all &= found[i];
    return all == ~0u;
  }
  __device__ __forceinline__ static bool none_missing(const State& state) {
    uint32_t any = 0;
#pragma unroll
    for (int i = 0; i < kWords; ++i) any |= state.missing[i];
    return any == 0;
  }
  __device__ __forceinline__ static void load(uint32_t to, int tile, int, bool values, const State& state,
                                              const Attention16Params& p) {
    const CopyLane<kDim, kThreads> lane(ptx::fresh_thread());
    const auto* base = static_cast<const char*>(values ? p.kv.v : p.kv.k);
    const int64_t* from = (values ? state.v : state.k)[tile % 2];
    const bool column = lane.chunk * 8 < p.query.head_dim;
    const auto copy = [&](int row, auto copy_chunk) {
      const int64_t at = from[row];
      copy_chunk(to + SharedTile<kDim>::offset(row, lane.chunk), base + (at + lane.chunk * 8) * 2, column && at >= 0);
    };
    if (state.narrow) {
#pragma unroll 1
      for (int i = 0; i < kTileK / lane.kStep; ++i) copy(lane.row + i * lane.kStep, copy_chunk_narrow);
      return;
    }
#pragma unroll 4
    for (int i = 0; i < kTileK / lane.kStep; ++i) copy(lane.row + i * lane.kStep, ptx::cp_async_16);
  }
};

}  // namespace flashq::cuda
