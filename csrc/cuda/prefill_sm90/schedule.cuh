// Which tile comes next, and which keys its rows see.
#pragma once
#include "core/mask.h"
#include "cuda/prefill_sm90/traits.cuh"

namespace flashq::cuda::sm90 {

// core/mask.h in 32 bits: the keys [begin, end) that a query of the tile sees.
struct Keys { int begin, end; };
__device__ __forceinline__ Keys visible_keys(const Schedule& s, const Tile& tile, int query) {
  const int position = tile.kv_len - tile.q_len + query;
  return {max(tile.kv_start, position - s.window_left), min(tile.kv_len, position + s.window_right + 1)};
}

// Tile number `i` of `heads` packs with `row_blocks` each. Where row blocks are alike, those of a head are neighbours.
// Else the longest come first, in sections of as many heads as L2 has room for: CTAs that work at the same time share
// their keys, and the last tiles to be drawn are short.
template <class C>
__device__ __forceinline__ void place_tile(const Schedule& s, int i, int row_blocks, int heads, int kv_len,
                                           int& row_block, int& head) {
  if (!s.descending) {
    row_block = i % row_blocks;
    head = i / row_blocks;
    return;
  }
  const int64_t shared = int64_t{max(s.l2_keys / max(kv_len, 1), 1)} * s.packs_per_kv;
  const auto section = static_cast<int>(min(int64_t{heads}, shared));
  const int first = i / (row_blocks * section) * section, rest = i - first * row_blocks;
  const int width = min(section, heads - first);
  row_block = row_blocks - 1 - rest / width;
  head = first + rest % width;
}

template <class C> __device__ __forceinline__ int row_blocks_of(const Schedule& s, int q_len) {
  return ((q_len << s.pack_log2) + C::kTileQ - 1) / C::kTileQ;
}

// Item number `item`, or kNoTile, to shared memory: field by field, because producers have few registers.
template <class C> __device__ __forceinline__ void find_tile(const Schedule& s, int item, Tile& tile) {
  const int id = item / s.splits;
  int row_block, head;
  if (s.plan) {
    const Plan& plan = *s.plan;
    if (id >= plan.tiles) {
      tile.row = kNoTile;
      return;
    }
    int low = 0, high = plan.sequences;  // the last sequence whose first tile is not past id
    while (high - low > 1) {
      const int middle = (low + high) / 2;
      (plan.sequence[middle].first_tile <= id ? low : high) = middle;
    }
    const PlannedSequence& found = plan.sequence[low];
    tile.batch = found.batch;
    tile.sequence = found.sequence;
    tile.q_begin = found.q_begin;
    tile.k_begin = found.k_begin;
    tile.kv_start = found.kv_start;
    tile.q_len = found.q_len;
    tile.kv_len = found.kv_len;
    place_tile<C>(s, id - found.first_tile, row_blocks_of<C>(s, found.q_len), s.head_packs, found.kv_len, row_block,
                  head);
  } else {
    if (id >= s.tiles) {
      tile.row = kNoTile;
      return;
    }
    place_tile<C>(s, id, row_blocks_of<C>(s, s.q_len), s.batch * s.head_packs, s.kv_len, row_block, head);
    tile.batch = tile.sequence = head / s.head_packs;
    head -= tile.batch * s.head_packs;
    tile.q_begin = tile.k_begin = tile.kv_start = 0;
    tile.q_len = s.q_len;
    tile.kv_len = s.kv_len;
  }
  tile.head = head;
  tile.row = row_block * C::kTileQ;
  const int last_query = min((tile.row + C::kTileQ - 1) >> s.pack_log2, tile.q_len - 1);
  const int begin = visible_keys(s, tile, tile.row >> s.pack_log2).begin, end = visible_keys(s, tile, last_query).end;
  int first = begin / C::kTileK, stop = begin < end ? (end + C::kTileK - 1) / C::kTileK : first;
  tile.split = item - id * s.splits;
  tile.seen = begin;
  if (s.splits > 1) {
    const int tiles = stop - first, parts = min(max(tiles * C::kTileK / kLeastSplit, 1), s.splits);
    stop = first + static_cast<int>(int64_t{tiles} * min(tile.split + 1, parts) / parts);
    first += static_cast<int>(int64_t{tiles} * min(tile.split, parts) / parts);
  }
  tile.first = first;
  tile.end = stop;
}

}  // namespace flashq::cuda::sm90
