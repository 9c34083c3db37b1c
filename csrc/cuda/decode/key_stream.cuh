// Keys and values on their way into shared memory: every team of warps has a ring of tiles and fills it ahead of its
// arithmetic, across the ends of segments, so the memory never waits for a result to be written.
//
// A tile is 16 tokens for each warp of the team, rows of K, then of V (SharedTile). Tokens that no row of the item
// sees are not read; their V becomes zeros, because a weight of 0 times whatever lies there could be NaN.
#pragma once
#include "cuda/decode/call.h"
#include "cuda/tile_copy.cuh"

namespace flashq::cuda {

inline constexpr int kGroup = 16, kGroupShift = 4;  // tokens: the depth of one product

// Lane 0 writes what all lanes of the warp computed alike; all of them read it in shared memory.
template <class X> __device__ __forceinline__ void publish(X& to, const X& x) {
  __syncwarp();
  if (threadIdx.x % 32 == 0) to = x;
  __syncwarp();
}

// kOneSegment: there is none behind the first. Tile: where a chunk of a row lies, SharedTile or BoxedTile.
template <int kDim, bool kOneSegment, class Tile> class KeyStream {
 public:
  static constexpr int kRowBytes = kDim * 2;
  static constexpr int kGroupBytes = kGroup * kRowBytes;  // of K or of V, for each warp of a team

  // `segment`: the first one, in shared memory because the main loop is short of registers; `item`: its rows.
  __device__ __forceinline__ KeyStream(const DecodeParams& p, Segment& segment, const ItemRows& item)
      : segment_(segment),
        item_(item),
        warp_tokens_((static_cast<int>(threadIdx.x) / 32 & (p.team_warps - 1)) * kGroup) {}

  // Starts the copy of the team's next tile to `tile`; `found` receives one bit for each of this warp's 16 tokens that
  // has a page. Past the last tile it only ends a group of copies.
  __device__ __forceinline__ void load_next(const DecodeParams& p, uint32_t tile, uint32_t* found) {
#pragma unroll 1
    while (first_ >= end_ && given_) {
      if (!entered_) {
        entered_ = true;
        enter(p, item_);
      } else if constexpr (kOneSegment) {
        given_ = false;
      } else {
        publish(segment_, next_segment(p.call, p.split, segment_));
        given_ = segment_.given();
        if (given_) enter(p, ItemRows(p.call, p.split, segment_));
      }
    }
    if (given_) {
      const uint32_t to = tile + warp_tokens_ * Tile::kRowBytes;
      if (p.whole_groups && p.wide_kv)
        copy_group(p, to, found);
      else
        copy_scattered(p, to, found);
      first_ += kGroup * p.team_warps;
      if (first_ < end_) look_up(p);
    }
    ptx::cp_async_commit();
  }

 private:
  static constexpr int kChunks = kDim / 8, kStep = 32 / kChunks;  // of a row; rows of one instruction

  __device__ __forceinline__ void enter(const DecodeParams& p, const ItemRows& rows) {
    batch_ = segment_.sequence.batch;
    begin_ = rows.begin;
    end_ = rows.end;
    first_ = rows.begin & -(kGroup * p.team_warps);
    const KvView& kv = p.call.kv;
    const int lane = static_cast<int>(threadIdx.x) % 32, row = lane / kChunks, chunk = lane % kChunks;
    int64_t page = 0, slot = row;
    if (in_place(p)) {
      page = batch_;
      slot += first_ + warp_tokens_;
    }
    k_ = place(kv.k, kv.k_stride, page, slot, rows.kv_head, chunk);
    v_ = place(kv.v, kv.v_stride, page, slot, rows.kv_head, chunk);
    page_ = batch_;
    if (first_ < end_) look_up(p);
  }

  // Whether k_ and v_ simply go on from tile to tile.
  static __device__ __forceinline__ bool in_place(const DecodeParams& p) {
    return !p.call.kv.block_table.given() && p.wide_kv;
  }
  static __device__ __forceinline__ const char* place(const void* base, const int64_t (&stride)[3], int64_t page,
                                                      int64_t slot, int kv_head, int chunk) {
    return static_cast<const char*>(base) + 2 * (page * stride[0] + slot * stride[1] + kv_head * stride[2] + chunk * 8);
  }

  // The page of this lane's token of the next tile, or of all 16 tokens. The table is read where a token is seen only.
  __device__ __forceinline__ void look_up(const DecodeParams& p) {
    const KvView& kv = p.call.kv;
    if (!kv.block_table.given()) return;
    const int token = first_ + warp_tokens_ + (p.whole_groups ? 0 : static_cast<int>(threadIdx.x) % kGroup);
    const int seen = max_of(begin_, min_of(token, end_ - 1));
    page_ = kv.block_table(batch_, p.page_size.quotient(seen));
    if (page_ < 0 || page_ >= kv.num_pages) page_ = -1;
  }
  __device__ __forceinline__ int slot_of(const DecodeParams& p, int token) const {
    if (!p.call.kv.block_table.given()) return token;
    return token - p.page_size.quotient(token) * static_cast<int>(p.page_size.value);
  }

  // 16 tokens of one page, rows that 16-byte loads can read.
  __device__ __forceinline__ void copy_group(const DecodeParams& p, uint32_t to, uint32_t* found) {
    const KvView& kv = p.call.kv;
    const int lane = static_cast<int>(threadIdx.x) % 32, row = lane / kChunks, chunk = lane % kChunks;
    const int first = first_ + warp_tokens_;
    const char *k = k_, *v = v_;
    if (in_place(p)) {
      k_ += p.k_tile_bytes;
      v_ += p.v_tile_bytes;
    } else {
      const int64_t page = max_of<int64_t>(page_, 0), slot = slot_of(p, first);
      k += 2 * (page * kv.k_stride[0] + slot * kv.k_stride[1]);
      v += 2 * (page * kv.v_stride[0] + slot * kv.v_stride[1]);
    }
    if (lane == 0) *found = page_ < 0 ? 0 : 0xffff;
    if (chunk * 8 >= static_cast<int>(p.call.query.head_dim)) return;
    const uint32_t to_v = to + p.team_warps * kGroupBytes;
    if (first >= begin_ && first + kGroup <= end_ && page_ >= 0) {
      copy_whole(to, k, p.k_row_bytes);
      copy_whole(to_v, v, p.v_row_bytes);
      return;
    }
    const int begin = begin_ - first, end = page_ < 0 ? 0 : end_ - first;
#pragma unroll 1
    for (int i = row; i < kGroup; i += kStep) {
      const uint32_t at = Tile::offset(i, chunk);
      ptx::cp_async_16(to + at, k + int64_t{i - row} * p.k_row_bytes, i >= begin && i < end);
      ptx::cp_async_16(to_v + at, v + int64_t{i - row} * p.v_row_bytes, i >= begin && i < end);
    }
  }

  static __device__ __forceinline__ void copy_whole(uint32_t to, const char* from, int row_bytes) {
    constexpr int kRows = 8 / kStep;  // of this lane, until the exchange of chunks repeats
    const int lane = static_cast<int>(threadIdx.x) % 32, row = lane / kChunks, chunk = lane % kChunks;
#pragma unroll
    for (int j = 0; j < kRows; ++j) {
      const uint32_t at = to + Tile::offset(row + j * kStep, chunk);
#pragma unroll
      for (int i = 0; i < kGroup / 8; ++i)
        ptx::cp_async_16(at + i * 8 * Tile::kRowBytes, from + int64_t{(8 * i + j * kStep) * row_bytes}, true);
    }
  }

  // 16 tokens wherever they are.
  __device__ __forceinline__ void copy_scattered(const DecodeParams& p, uint32_t to, uint32_t* found) {
    const KvView& kv = p.call.kv;
    const int lane = static_cast<int>(threadIdx.x) % 32, row = lane / kChunks, chunk = lane % kChunks;
    const int token = first_ + warp_tokens_ + lane % kGroup;  // whose place this lane finds
    const bool there = token >= begin_ && token < end_ && page_ >= 0;
    const int64_t slot = slot_of(p, token), page = max_of<int64_t>(page_, 0);
    const int64_t k = 2 * (page * kv.k_stride[0] + slot * kv.k_stride[1]);
    const int64_t v = 2 * (page * kv.v_stride[0] + slot * kv.v_stride[1]);
    const unsigned all = __ballot_sync(~0u, there);
    if (lane == 0) *found = all & 0xffff;
#pragma unroll 1
    for (int i = row; i < kGroup; i += kStep) {
      const char* from_k = k_ - 2 * row * kv.k_stride[1] + __shfl_sync(~0u, k, i);
      const char* from_v = v_ - 2 * row * kv.v_stride[1] + __shfl_sync(~0u, v, i);
      if (chunk * 8 >= p.call.query.head_dim) continue;
      const uint32_t at = to + Tile::offset(i, chunk);
      if (p.wide_kv) {
        ptx::cp_async_16(at, from_k, all >> i & 1);
        ptx::cp_async_16(at + p.team_warps * kGroupBytes, from_v, all >> i & 1);
      } else {
        copy_chunk_narrow(at, from_k, all >> i & 1);
        copy_chunk_narrow(at + p.team_warps * kGroupBytes, from_v, all >> i & 1);
      }
    }
  }

  Segment& segment_;
  const ItemRows& item_;
  bool entered_ = false, given_ = true;     // a segment has been entered; there is one to load
  int warp_tokens_;                         // where this warp's tokens of a tile start
  int batch_ = 0, begin_ = 0, end_ = 0;     // of the segment; its keys that are read
  int first_ = 0;                           // token of the team's next tile
  int64_t page_ = 0;                        // of that tile; -1: none
  const char *k_ = nullptr, *v_ = nullptr;  // this lane's chunk of its first row: of the next tile, or of page 0
};

}  // namespace flashq::cuda
