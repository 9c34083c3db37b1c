// Sequences as the device sees them: index tensors are read and clamped here, and tiles of rows are found in them.
//
// Row r of a (sequence, KV head) is query r / group of head r % group, so the group's heads share every K/V tile.
#pragma once
#include "core/mask.h"
#include "cuda/vector.cuh"
#include "params.h"

namespace flashq::cuda {

FLASHQ_HD int64_t clamp(int64_t x, int64_t least, int64_t most) { return max_of(least, min_of(x, most)); }

// An element of an index tensor that the kernel before this one may be writing yet.
__device__ __forceinline__ int64_t load_past_l1(const IndexView& view, int64_t i, int64_t j = 0) {
  const int64_t at = i * view.stride[0] + j * view.stride[1];
  return view.is_int64 ? __ldcg(static_cast<const long long*>(view.data) + at)
                       : __ldcg(static_cast<const int*>(view.data) + at);
}

// Keys of a tile that lie in a range: [begin, end), counted from the tile's first.
struct TileRange { int begin, end; };

__device__ __forceinline__ TileRange range_in_tile(KeyRange keys, int64_t first_key, int tile_keys) {
  const auto place = [&](int64_t key) {
    return static_cast<int>(min_of<int64_t>(max_of<int64_t>(key - first_key, 0), tile_keys));
  };
  return {place(keys.begin), place(keys.end)};
}

struct Sequence {
  int64_t batch;             // its page, or its row of a page table
  int64_t q_begin, k_begin;  // where its tokens start, in packed q and packed K/V
  Mask mask;
  bool padding;  // rows past cu_seqlens_q: no keys, and no sinks either

  FLASHQ_HD bool empty() const { return mask.q_len <= 0; }
};

// A tile of rows [first_row, first_row + tile_rows) of a sequence; an empty sequence where there is no such tile.
struct RowTile {
  Sequence sequence;
  int64_t first_row;
};

// How many tiles there may be, from what the host knows.
inline int64_t count_row_tiles(const QueryView& q, int64_t tile_rows) {
  if (q.total_tokens == 0) return 0;
  const int64_t group = q.q_heads / q.kv_heads;
  if (!q.cu_seqlens_q.given()) return q.batch * ceil_div(q.q_len * group, tile_rows);
  return q.total_tokens * group / tile_rows + min_of(q.batch, q.total_tokens) + 1;  // each ends in a partial tile
}

// Sequence b with these tokens; its length and kv_start come from their tensors where there are any.
__device__ __forceinline__ Sequence describe_sequence(const Attention16Params& p, int64_t b, KeyRange q, KeyRange k) {
  Sequence s{.batch = b,
             .q_begin = q.begin,
             .k_begin = k.begin,
             .mask = {.q_len = q.end - q.begin,
                      .kv_len = k.end - k.begin,
                      .kv_start = 0,
                      .window_left = p.score.window_left,
                      .window_right = p.score.window_right,
                      .causal = p.score.causal},
             .padding = p.query.cu_seqlens_q.given() && b == p.query.batch};
  if (s.padding) {
    s.mask.kv_len = 0;
    return s;
  }
  if (p.seqlens.given()) s.mask.kv_len = clamp(p.seqlens(b), 0, kv_capacity(p.kv));
  if (p.kv_start.given()) s.mask.kv_start = clamp(p.kv_start(b), 0, s.mask.kv_len);
  return s;
}

template <class X, class Op> __device__ __forceinline__ X scan_warp(X x, Op op) {
  const unsigned lane = threadIdx.x % 32;
#pragma unroll
  for (unsigned step = 1; step < 32; step *= 2) {
    const X other = __shfl_up_sync(~0u, x, step);
    if (lane >= step) x = op(x, other);
  }
  return x;
}

// Where packed sequence b begins: 0 for the first, for others the largest offset up to its own, of `tokens` at most.
// That is the offset itself, if all are in range. Called by whole warps, all of whose lanes get the same answer.
__device__ __forceinline__ int64_t packed_begin(const IndexView& cu_seqlens, int64_t b, int64_t tokens) {
  int64_t largest = 0;
#pragma unroll 4
  for (int64_t i = 1 + threadIdx.x % 32; i <= b; i += 32) largest = max_of(largest, cu_seqlens(i));
#pragma unroll
  for (int step = 1; step < 32; step *= 2) largest = max_of(largest, __shfl_xor_sync(~0u, largest, step));
  return min_of(largest, tokens);
}

// Tile number `tile` of all sequences. Called by whole warps, all of whose lanes get the same answer. Packed sequences
// are scanned 32 at a time: for up to 32 of them that is two loads, where a bisection would be five in a row.
__device__ __forceinline__ RowTile locate_row_tile(const Attention16Params& p, int64_t tile_rows, int64_t tile) {
  const QueryView& query = p.query;
  const int64_t group = divide(query.q_heads, query.kv_heads).quotient;
  if (!query.cu_seqlens_q.given()) {
    const Quotient at = divide(tile, ceil_div(query.q_len * group, tile_rows));
    return {describe_sequence(p, at.quotient, {0, query.q_len}, {0, p.kv.page_size}), at.remainder * tile_rows};
  }
  const auto larger = [](int64_t a, int64_t b) { return max_of(a, b); };
  const auto sum = [](int64_t a, int64_t b) { return a + b; };
  const IndexView &cu_q = query.cu_seqlens_q, &cu_k = p.kv.cu_seqlens_k;
  const unsigned lane = threadIdx.x % 32;
  int64_t q_before = 0, k_before = 0, tiles_before = 0;
  for (int64_t base = 0; base <= query.batch; base += 32) {  // sequence `batch` is the padding
    const int64_t b = base + lane;
    const bool real = b < query.batch;
    int64_t q_end = real ? clamp(cu_q(b + 1), q_before, query.total_tokens) : query.total_tokens;
    int64_t k_end = real && cu_k.given() ? clamp(cu_k(b + 1), k_before, p.kv.page_size) : k_before;
    q_end = scan_warp(q_end, larger);
    k_end = scan_warp(k_end, larger);
    int64_t q_begin = __shfl_up_sync(~0u, q_end, 1), k_begin = __shfl_up_sync(~0u, k_end, 1);
    if (lane == 0) {
      q_begin = q_before;
      k_begin = k_before;
    }
    const int64_t tiles = ceil_div((q_end - q_begin) * group, tile_rows);
    const int64_t tiles_end = tiles_before + scan_warp(tiles, sum);
    const unsigned behind = __ballot_sync(~0u, tiles_end > tile);
    if (behind) {
      const int owner = __ffs(static_cast<int>(behind)) - 1;
      const auto from = [owner](int64_t x) { return __shfl_sync(~0u, x, owner); };
      const int64_t first = from(tiles_end - tiles);
      return {describe_sequence(p, base + owner, {from(q_begin), from(q_end)}, {from(k_begin), from(k_end)}),
              (tile - first) * tile_rows};
    }
    q_before = __shfl_sync(~0u, q_end, 31);
    k_before = __shfl_sync(~0u, k_end, 31);
    tiles_before = __shfl_sync(~0u, tiles_end, 31);
  }
  return {};
}

}  // namespace flashq::cuda
