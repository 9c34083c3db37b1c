// Keys and values on their way into shared memory: every team of warps has a ring of tiles and fills it ahead of its
// arithmetic, across the ends of segments, so the memory never waits for a merge.
//
// A tile is 16 tokens for each warp of the team, rows of K, then of V (SharedTile). Tokens that no row of the item
// sees are not read; their V becomes zeros, because a weight of 0 times whatever lies there could be NaN.
#pragma once
#include "cuda/decode/call.h"
#include "cuda/tile_copy.cuh"

namespace flashq::cuda {

inline constexpr int kGroup = 16, kGroupShift = 4;  // tokens: the depth of one product

// What the rows of a segment's item are, and which keys they see within the segment.
struct ItemRows {
  int kv_head, first_row, first_query, last_query, rows;
  int begin, end;  // the keys; none: both 0

  __device__ __forceinline__ ItemRows(const AttentionParams& p, const SplitConfig& c, const Segment& s) {
    const PlannedSequence& sequence = s.sequence;
    const int block_rows = static_cast<int>(c.block_rows.value);
    kv_head = sequence.row_blocks == 1 ? s.item : divide_down(s.item, sequence.row_blocks);
    first_row = (s.item - kv_head * sequence.row_blocks) * block_rows;
    rows = min_of(block_rows, sequence.q_len * c.group_size() - first_row);
    first_query = c.group.quotient(first_row);
    last_query = c.group.quotient(first_row + rows - 1);
    const int64_t first_unit = sequence.first_unit + s.lo, end_unit = sequence.first_unit + s.hi;
    const KeyRange seen = intersect(sequence.mask(p.score).visible(first_query, last_query),
                                    {first_unit * c.unit.value, end_unit * c.unit.value});
    begin = seen.empty() ? 0 : static_cast<int>(seen.begin);
    end = seen.empty() ? 0 : static_cast<int>(seen.end);
  }
};

// Lane 0 writes what all lanes of the warp computed alike; all of them read it in shared memory.
template <class X> __device__ __forceinline__ void publish(X& to, const X& x) {
  __syncwarp();
  if (threadIdx.x % 32 == 0) to = x;
  __syncwarp();
}

// The segment that a warp is loading. In shared memory, because the main loop is short of registers.
struct LoadedSegment {
  Segment segment;
  int kv_head;
  int begin, end;  // keys that are read
  int origin;      // token where the first tile starts
};

template <int kDim> class KeyStream {
 public:
  static constexpr int kRowBytes = kDim * 2;
  static constexpr int kGroupBytes = kGroup * kRowBytes;  // of K or of V, for each warp of a team

  // state.segment is the first segment.
  __device__ __forceinline__ KeyStream(const DecodeParams& p, LoadedSegment& state)
      : state_(state), warp_(static_cast<int>(threadIdx.x) / 32 & (p.team_warps - 1)) {}

  // Starts the copy of the team's next tile to `tile`; `found` receives one bit for each of this warp's 16 tokens that
  // has a page. Past the last tile it only ends a group of copies.
  __device__ __forceinline__ void load_next(const DecodeParams& p, uint32_t tile, uint32_t* found) {
#pragma unroll 1
    while (tile_ >= tiles_ && given_) {
      if (!first_) publish(state_.segment, next_segment(p.call, p.split, state_.segment));
      first_ = false;
      enter(p);
    }
    if (given_) {
      const int first = state_.origin + (tile_ * p.team_warps + warp_) * kGroup;
      const uint32_t to = tile + warp_ * kGroupBytes;
      if (p.whole_groups && p.wide_kv) {
        copy_group(p, first, to, found);
      } else {
        copy_scattered(p, first, to, found);
      }
      tile_ += teams(p);
      if (tile_ < tiles_) look_up(p);
    }
    ptx::cp_async_commit();
  }

 private:
  static constexpr int kChunks = kDim / 8, kStep = 32 / kChunks;  // of a row; rows of one instruction

  static __device__ __forceinline__ int teams(const DecodeParams& p) {
    return static_cast<int>(blockDim.x) / 32 >> p.team_shift;
  }

  __device__ __forceinline__ void enter(const DecodeParams& p) {
    given_ = state_.segment.given();
    tile_ = static_cast<int>(threadIdx.x) / 32 >> p.team_shift;
    tiles_ = 0;
    if (!given_) return;
    const ItemRows rows(p.call, p.split, state_.segment);
    const int tokens = kGroup * p.team_warps, origin = rows.begin & -tokens;
    if (threadIdx.x % 32 == 0) {
      state_.kv_head = rows.kv_head;
      state_.begin = rows.begin;
      state_.end = rows.end;
      state_.origin = origin;
    }
    __syncwarp();
    tiles_ = (rows.end - origin + tokens - 1) >> (kGroupShift + p.team_shift);
    if (tile_ < tiles_) look_up(p);
  }

  // The page of this lane's token of the next tile, or of all 16 tokens. The table is read where a token is seen only.
  __device__ __forceinline__ void look_up(const DecodeParams& p) {
    const KvView& kv = p.call.kv;
    page_ = state_.segment.sequence.batch;
    if (!kv.block_table.given()) return;
    const int token = state_.origin + (tile_ * p.team_warps + warp_) * kGroup +
                      (p.whole_groups ? 0 : static_cast<int>(threadIdx.x) % kGroup);
    const int seen = max_of(state_.begin, min_of(token, state_.end - 1));
    page_ = kv.block_table(state_.segment.sequence.batch, p.page_size.quotient(seen));
    if (page_ < 0 || page_ >= kv.num_pages) page_ = -1;
  }
  __device__ __forceinline__ int slot_of(const DecodeParams& p, int token) const {
    if (!p.call.kv.block_table.given()) return token;
    return token - p.page_size.quotient(token) * static_cast<int>(p.page_size.value);
  }

  // 16 tokens of one page, rows that 16-byte loads can read.
  __device__ __forceinline__ void copy_group(const DecodeParams& p, int first, uint32_t to, uint32_t* found) {
    const KvView& kv = p.call.kv;
    const int lane = static_cast<int>(threadIdx.x) % 32, row = lane / kChunks, chunk = lane % kChunks;
    const int begin = state_.begin - first, end = page_ < 0 ? 0 : state_.end - first;
    if (lane == 0) *found = page_ < 0 ? 0 : 0xffff;
    if (chunk * 8 >= p.call.query.head_dim) return;
    const int64_t page = max_of<int64_t>(page_, 0), slot = slot_of(p, first) + row;
    const char* k = static_cast<const char*>(kv.k) + 2 * (page * kv.k_stride[0] + slot * kv.k_stride[1] +
                                                          int64_t{state_.kv_head} * kv.k_stride[2] + chunk * 8);
    const char* v = static_cast<const char*>(kv.v) + 2 * (page * kv.v_stride[0] + slot * kv.v_stride[1] +
                                                          int64_t{state_.kv_head} * kv.v_stride[2] + chunk * 8);
    const uint32_t to_v = to + p.team_warps * kGroupBytes;
    const int64_t k_step = 2 * kStep * kv.k_stride[1], v_step = 2 * kStep * kv.v_stride[1];
#pragma unroll 8
    for (int i = 0; i < kGroup / kStep; ++i) {
      const bool wanted = row + i * kStep >= begin && row + i * kStep < end;
      ptx::cp_async_16(to + SharedTile<kDim>::offset(row + i * kStep, chunk), k, wanted);
      k += k_step;
    }
#pragma unroll 8
    for (int i = 0; i < kGroup / kStep; ++i) {
      const bool wanted = row + i * kStep >= begin && row + i * kStep < end;
      ptx::cp_async_16(to_v + SharedTile<kDim>::offset(row + i * kStep, chunk), v, wanted);
      v += v_step;
    }
  }

  // 16 tokens wherever they are.
  __device__ __forceinline__ void copy_scattered(const DecodeParams& p, int first, uint32_t to, uint32_t* found) {
    const KvView& kv = p.call.kv;
    const int lane = static_cast<int>(threadIdx.x) % 32, chunk = lane % kChunks;
    const int token = first + lane % kGroup;  // whose place this lane finds
    const bool there = token >= state_.begin && token < state_.end && page_ >= 0;
    const int64_t slot = slot_of(p, token), page = max_of<int64_t>(page_, 0);
    const int64_t k = page * kv.k_stride[0] + slot * kv.k_stride[1] + int64_t{state_.kv_head} * kv.k_stride[2];
    const int64_t v = page * kv.v_stride[0] + slot * kv.v_stride[1] + int64_t{state_.kv_head} * kv.v_stride[2];
    const unsigned all = __ballot_sync(~0u, there);
    if (lane == 0) *found = all & 0xffff;
#pragma unroll 1
    for (int i = lane / kChunks; i < kGroup; i += kStep) {
      const int64_t from_k = __shfl_sync(~0u, k, i), from_v = __shfl_sync(~0u, v, i);
      if (chunk * 8 >= p.call.query.head_dim) continue;
      const uint32_t at = to + SharedTile<kDim>::offset(i, chunk);
      const auto* k_chunk = static_cast<const uint16_t*>(kv.k) + from_k + chunk * 8;
      const auto* v_chunk = static_cast<const uint16_t*>(kv.v) + from_v + chunk * 8;
      if (p.wide_kv) {
        ptx::cp_async_16(at, k_chunk, all >> i & 1);
        ptx::cp_async_16(at + p.team_warps * kGroupBytes, v_chunk, all >> i & 1);
      } else {
        copy_chunk_narrow(at, k_chunk, all >> i & 1);
        copy_chunk_narrow(at + p.team_warps * kGroupBytes, v_chunk, all >> i & 1);
      }
    }
  }

  LoadedSegment& state_;
  bool first_ = true, given_ = true;  // no segment has been entered yet; there is one to load
  int tile_ = 0, tiles_ = 0;          // the next tile of this team, and how many the segment has
  int64_t page_ = 0;                  // -1: none
  int warp_;                          // of its team
};

}  // namespace flashq::cuda
