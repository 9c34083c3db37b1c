// Codes, norms and page offsets on their way into shared memory: every warp has a ring of tiles and fills it ahead of
// its arithmetic, across the ends of segments.
//
// Tokens that no row of the item sees, and those on pages that do not exist, are not read; whatever lies in their place
// is a code, which is finite, or a norm, which the arithmetic leaves out.
#pragma once
#include "cuda/tbq4_attention/shared.cuh"
#include "cuda/tile_copy.cuh"

namespace flashq::cuda {

// Where a token lies: its page, and its row of the planes (page, KV head, slot). -1: its page does not exist.
struct PlaneRow { int64_t page, row; };

__device__ __forceinline__ PlaneRow plane_row(const CodeParams& p, int sequence, int kv_head, int token) {
  const Tbq4View& kv = p.call.kv;
  int64_t page = sequence;
  int slot = token;
  if (kv.block_table.given()) {
    const int entry = p.page_size.quotient(token);
    page = kv.block_table(sequence, entry);
    if (page < 0 || page >= kv.num_pages) return {-1, -1};
    slot = token - entry * static_cast<int>(p.page_size.value);
  }
  return {page, (page * p.call.query.kv_heads + kv_head) * kv.page_size + slot};
}
__device__ __forceinline__ const uint16_t* offset_of_page(const CodeParams& p, int64_t page, int kv_head) {
  return p.call.kv.k_offsets + page * p.call.kv.k_offsets_stride[0] + kv_head * p.call.kv.k_offsets_stride[1];
}

template <int D> class CodeStream {
  using Tile = CodeTile<D>;
  static constexpr int kLanes = 32 / Tile::kGroups;                // that copy the same 16 tokens
  static constexpr int kNormChunks = 16 * Tile::kBlocks * 2 / 16;  // of 16 tokens

 public:
  // state.segment is the first segment.
  __device__ __forceinline__ CodeStream(const CodeParams& p, LoadedSegment& state, uint32_t shared, int ring)
      : state_(state), shared_(shared), ring_(ring) {
    const uint32_t lane = threadIdx.x % 32, group = lane / kLanes, chunk = lane % kLanes;
    to_ = Tile::swizzle(group * (Tile::kBytes / Tile::kGroups) + chunk * 16);
  }

  // Whether all tokens of the tile in buffer `stage` that some row sees are there.
  __device__ __forceinline__ bool complete(int stage) const { return complete_ >> stage & 1; }

  // Starts the copy of this warp's next tile to buffer `stage` of its ring. Past the last tile it only ends a group of
  // copies.
  __device__ __forceinline__ void load_next(const CodeParams& p, int stage) {
#pragma unroll 1
    while (tile_ >= tiles_ && given_) {
      if (!first_) publish(state_.segment, next_segment(p.call, p.split, state_.segment));
      first_ = false;
      enter(p);
    }
    if (given_) {
      bool all;
      if (p.whole_groups) {
        if (next_ == kBatch) look_up(p);
        all = copy_groups(p, stage);
      } else {
        all = copy_scattered(p, state_, tile_, shared_ + p.at.codes + (ring_ + stage) * 2 * Tile::kBytes,
                             shared_ + p.at.norms + (ring_ + stage) * 2 * Tile::kNormBytes);
      }
      complete_ = all ? complete_ | 1u << stage : complete_ & ~(1u << stage);
      tile_ += static_cast<int>(blockDim.x) / 32;
    }
    ptx::cp_async_commit();
  }

 private:
  static constexpr int kBatch = 32 / Tile::kGroups;  // tiles that are looked up at once

  __device__ __forceinline__ void enter(const CodeParams& p) {
    given_ = state_.segment.given();
    tile_ = static_cast<int>(threadIdx.x) / 32;
    tiles_ = 0;
    next_ = kBatch;
    if (!given_) return;
    const ItemRows rows(p.call, p.split, state_.segment);
    const int origin = rows.begin & -Tile::kTokens;
    if (threadIdx.x % 32 == 0) {
      state_.kv_head = rows.kv_head;
      state_.begin = rows.begin;
      state_.end = rows.end;
      state_.origin = origin;
    }
    __syncwarp();
    tiles_ = (rows.end - origin + Tile::kTokens - 1) / Tile::kTokens;
  }

  // Where the 16-token groups of this warp's next tiles lie, one for each lane: tables are read once for many tiles,
  // and only where a token is seen.
  __device__ __forceinline__ void look_up(const CodeParams& p) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const int tile = tile_ + lane / Tile::kGroups * (static_cast<int>(blockDim.x) / 32);
    const int token = state_.origin + tile * Tile::kTokens + lane % Tile::kGroups * 16;
    const bool wanted = token < state_.end && token + 16 > state_.begin;
    const PlaneRow at = wanted ? plane_row(p, state_.segment.sequence.batch, state_.kv_head, token) : PlaneRow{-1, -1};
    row_ = at.row;
    page_ = static_cast<int>(at.page);  // fewer than 2^31: a page has 16 tokens and more
    missing_ = __ballot_sync(~0u, wanted && at.row < 0);
    next_ = 0;
  }

  __device__ __forceinline__ bool copy_groups(const CodeParams& p, int stage) {
    const Tbq4View& kv = p.call.kv;
    const int lane = static_cast<int>(threadIdx.x) % 32, chunk = lane % kLanes, group = lane / kLanes;
    const int source = next_ * Tile::kGroups + group;
    const int64_t found = __shfl_sync(~0u, row_, source), row = max_of<int64_t>(found, 0);
    const bool there = found >= 0;
    const int64_t from = row * Tile::kTokenBytes + chunk * 16;
    const uint32_t to = shared_ + p.at.codes + (ring_ + stage) * 2 * Tile::kBytes + to_;
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      // k * kLanes chunks are other bits of the place than those in to_, so their exchanges can be combined.
      constexpr uint32_t kInLine = 127;
      const uint32_t at = (to ^ (Tile::swizzle(k * kLanes * 16) & kInLine)) + k * kLanes * 16;
      ptx::cp_async_16(at, kv.k_codes + from + k * kLanes * 16, there);
      ptx::cp_async_16(at + Tile::kBytes, kv.v_codes + from + k * kLanes * 16, there);
    }
    if (chunk < 2 * kNormChunks) {
      const bool values = chunk >= kNormChunks;
      const int part = values ? chunk - kNormChunks : chunk;
      const uint16_t* plane = values ? kv.v_norms : kv.k_norms;
      ptx::cp_async_16(shared_ + p.at.norms + (ring_ + stage) * 2 * Tile::kNormBytes + (values ? Tile::kNormBytes : 0) +
                           (group * kNormChunks + part) * 16,
                       plane + row * Tile::kBlocks + part * 8, there);
    }
    if (kv.k_offsets) {
      const int page = __shfl_sync(~0u, page_, source);
      const uint16_t* offset = offset_of_page(p, max_of(page, 0), state_.kv_head) + chunk * 8;
      const uint32_t at = shared_ + p.at.offsets + (ring_ + stage) * kOffsetBytes + lane * 16;
      if (p.wide_offsets)
        ptx::cp_async_16(at, offset, there);
      else
        copy_chunk_narrow(at, offset, there);
    }
    constexpr uint32_t kAllGroups = (1u << Tile::kGroups) - 1;
    const bool all = (missing_ >> (next_ * Tile::kGroups) & kAllGroups) == 0;
    ++next_;
    return all;
  }

  // Tokens looked up one by one, 16-bit loads and stores of norms, all without running ahead.
  static __device__ __noinline__ bool copy_scattered(const CodeParams& p, const LoadedSegment& state, int tile,
                                                     uint32_t codes, uint32_t norms) {
    const Tbq4View& kv = p.call.kv;
    const int lane = static_cast<int>(threadIdx.x) % 32, first = state.origin + tile * Tile::kTokens;
    constexpr int kOfLane = (Tile::kTokens + 31) / 32;  // tokens
    int64_t rows[kOfLane];
    bool all = true;
#pragma unroll
    for (int i = 0; i < kOfLane; ++i) {
      const int token = first + 32 * i + lane;
      const bool wanted = 32 * i + lane < Tile::kTokens && token >= state.begin && token < state.end;
      rows[i] = wanted ? plane_row(p, state.segment.sequence.batch, state.kv_head, token).row : -1;
      all = all && (rows[i] >= 0 || !wanted);
      if (rows[i] < 0) continue;
#pragma unroll
      for (int b = 0; b < Tile::kBlocks; ++b) {
        const uint32_t at = norms + ((32 * i + lane) * Tile::kBlocks + b) * 2;
        const uint16_t k = kv.k_norms[rows[i] * Tile::kBlocks + b], v = kv.v_norms[rows[i] * Tile::kBlocks + b];
        asm volatile("st.shared.b16 [%0], %1;" ::"r"(at), "h"(k) : "memory");
        asm volatile("st.shared.b16 [%0], %1;" ::"r"(at + Tile::kNormBytes), "h"(v) : "memory");
      }
    }
    constexpr int kChunks = Tile::kTokenBytes / 16;  // of a token
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const int chunk = 32 * k + lane, token = chunk / kChunks;
      const int64_t row = __shfl_sync(~0u, rows[32 * k / kChunks / 32], token % 32);
      if (row < 0) continue;
      const int64_t from = row * Tile::kTokenBytes + chunk % kChunks * 16;
      const uint32_t at = codes + Tile::swizzle(chunk * 16);
      if (p.wide_codes) {
        ptx::cp_async_16(at, kv.k_codes + from, true);
        ptx::cp_async_16(at + Tile::kBytes, kv.v_codes + from, true);
      } else {
        copy_bytes(at, kv.k_codes + from);
        copy_bytes(at + Tile::kBytes, kv.v_codes + from);
      }
    }
    return __all_sync(~0u, all);
  }
  static __device__ __forceinline__ void copy_bytes(uint32_t to, const uint8_t* from) {
#pragma unroll 1
    for (int i = 0; i < 16; ++i)
      asm volatile("st.shared.b8 [%0], %1;" ::"r"(to + i), "r"(uint32_t{from[i]}) : "memory");
  }

  LoadedSegment& state_;
  uint32_t shared_;                   // the address of shared memory
  int ring_;                          // number of this warp's first buffer
  uint32_t to_;                       // where this lane's first piece of a tile goes
  uint32_t complete_ = 0;             // one bit for each buffer
  bool first_ = true, given_ = true;  // no segment has been entered yet; there is one to load
  int tile_ = 0, tiles_ = 0;          // the next tile of this warp, and how many the segment has
  int64_t row_ = -1;                  // of this lane's 16 tokens of a batch of tiles; -1: not there
  int page_ = -1, next_ = kBatch;     // next_: of the batch, the tile to copy next
  uint32_t missing_ = 0;              // lanes whose tokens are wanted and not there
};

}  // namespace flashq::cuda
