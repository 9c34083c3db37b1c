// Codes and norms on their way into shared memory: every warp has a ring of tiles and fills it ahead of its arithmetic,
// across the ends of segments.
//
// Tokens that no row of the item sees, and those on pages that do not exist, are not read; whatever lies in their place
// is a code, which is finite, or a norm, which the arithmetic leaves out.
#pragma once
#include "cuda/tbq4_attention/offsets.cuh"

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

template <int D, int kTiles> class CodeStream {
  using Tile = CodeTile<D>;
  static constexpr int kLanes = 32 / Tile::kGroups;                // that copy the same 16 tokens
  static constexpr int kNormChunks = 16 * Tile::kBlocks * 2 / 16;  // of 16 tokens
  static constexpr int kBatch = 32 / Tile::kGroups;                // tiles that are looked up at once

 public:
  // mine.loaded is the first segment.
  __device__ __forceinline__ CodeStream(const CodeParams& p, CodeSegments& mine, unsigned char* memory)
      : mine_(mine), memory_(memory) {
    const uint32_t lane = threadIdx.x % 32, group = lane / kLanes, chunk = lane % kLanes;
    const uint32_t shared = ptx::shared_address(memory), part = chunk % kNormChunks;
    to_ = shared + kPairTableBytes + Tile::swizzle(group * (Tile::kBytes / Tile::kGroups) + chunk * 16);
    norm_to_ = shared + p.at.norms + (chunk == part ? 0 : Tile::kNormBytes) + (group * kNormChunks + part) * 16;
  }

  // Starts the copy of this warp's next tile to a buffer. Past the last tile it only ends a group of copies.
  __device__ __forceinline__ void load_next(const CodeParams& p, int buffer) {
    bool fresh = left_ % kBatch == 0;
    if (left_ == 0) [[unlikely]]
      advance(p);
    if (left_ > 0) [[likely]] {
      if (p.whole_groups) [[likely]] {
        if (fresh) [[unlikely]]
          look_up(p);
        copy_groups(p, buffer, fresh);
      } else {
        copy_scattered(p, mine_, memory_, next_token(left_), buffer);
      }
      --left_;
    }
    ptx::cp_async_commit();
  }

 private:
  // To the next segment with tokens.
  __device__ __forceinline__ void advance(const CodeParams& p) {
#pragma unroll 1
    while (left_ == 0 && mine_.more) {
      if (started_) publish(mine_.loaded, next_segment(p.call, p.split, mine_.loaded));
      started_ = true;
      publish(mine_.more, mine_.loaded.given());
      if (!mine_.more) return;
      publish(mine_.loaded_item, ItemRows(p.call, p.split, mine_.loaded));
      const ItemRows& item = mine_.loaded_item;
      left_ = (item.end - (item.begin & -Tile::kTokens) + Tile::kTokens - 1) / Tile::kTokens;
    }
  }
  // Where a tile starts, from how many tiles there are from it on.
  __device__ __forceinline__ int next_token(int left) const {
    return ((mine_.loaded_item.end + Tile::kTokens - 1) / Tile::kTokens - left) * Tile::kTokens;
  }

  // Where the groups of 16 tokens of the next tiles lie, up to a multiple of kBatch from the segment's end: tables are
  // read once for many tiles, and only where a token is seen.
  __device__ __forceinline__ void look_up(const CodeParams& p) {
    const int lane = ptx::fresh_lane();
    const int token = next_token((left_ + kBatch - 1) / kBatch * kBatch) + lane * 16;
    const ItemRows& item = mine_.loaded_item;
    const bool wanted = token < item.end && token + 16 > item.begin;
    const PlaneRow at = wanted ? plane_row(p, mine_.loaded.sequence.batch, item.kv_head, token) : PlaneRow{-1, -1};
    __syncwarp();
    mine_.rows[lane] = static_cast<uint32_t>(at.row);  // fewer than 2^32 - 1
    mine_.pages[lane] = static_cast<int>(at.page);     // below 2^31: a page has 16 tokens and more
    if (wanted && at.row < 0) mine_.lose();
    __syncwarp();
  }

  __device__ __forceinline__ void copy_groups(const CodeParams& p, int buffer, bool fresh) {
    const Tbq4View& kv = p.call.kv;
    const uint32_t lane = threadIdx.x % 32, chunk = lane % kLanes, group = lane / kLanes;
    const uint32_t first = (-static_cast<uint32_t>(left_) % kBatch) * Tile::kGroups, row = mine_.rows[first + group];
    const bool there = row != kNowhere;
    const uint64_t from = uint64_t{row} * Tile::kTokenBytes + chunk * 16;
    const uint32_t to = to_ + buffer * 2 * Tile::kBytes;
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      // k * kLanes chunks are other bits of the place than those in to_, so their exchanges can be combined.
      constexpr uint32_t kInLine = 127;
      const uint32_t at = (to ^ (Tile::swizzle(k * kLanes * 16) & kInLine)) + k * kLanes * 16;
      ptx::cp_async_16_if(there, at, kv.k_codes + from + k * kLanes * 16);
      ptx::cp_async_16_if(there, at + Tile::kBytes, kv.v_codes + from + k * kLanes * 16);
    }
    const int64_t plane = chunk < kNormChunks ? 0 : p.v_norms_from_k;
    ptx::cp_async_16_if(there && chunk < 2 * kNormChunks, norm_to_ + buffer * 2 * Tile::kNormBytes,
                        reinterpret_cast<const char*>(kv.k_norms) + plane + uint64_t{row} * (Tile::kBlocks * 2) +
                            chunk % kNormChunks * 16);
    if (kv.k_offsets) [[unlikely]]
      copy_offsets(p, buffer, static_cast<int>(first), fresh);
  }

  // What the pages of the tile's groups add to scores; worked out for 16 groups at a time.
  __device__ __forceinline__ void copy_offsets(const CodeParams& p, int buffer, int first, bool fresh) const {
    const int lane = ptx::fresh_lane(), g = lane / 4, t = lane % 4;
    const int group = first % kOffsetGroups;
    unsigned char* const own =
        memory_ + p.at.next_offsets + ptx::fresh_thread() / 32 * (kOffsetGroups * kOffsetBytes<kTiles>);
    if (fresh || group == 0) {
      const int page[2] = {mine_.pages[first - group + g], mine_.pages[first - group + g + 8]};
      float s[kTiles][4];
      score_pages<D, kTiles>(p, mine_.loaded, mine_.loaded_item, page, s);
#pragma unroll
      for (int n = 0; n < kTiles; ++n)
#pragma unroll
        for (int h = 0; h < 2; ++h)
          store(own + (g + 8 * h) * kOffsetBytes<kTiles> + (8 * n + 2 * t) * 4,
                Vector<float, 2>{s[n][2 * h], s[n][2 * h + 1]});
      __syncwarp();
    }
    constexpr int kBytes = offset_bytes<D, kTiles>(true);  // 256 at most
    if (lane < kBytes / 8)
      store(memory_ + p.at.offsets + buffer * kBytes + lane * 8,
            load<Vector<float, 2>>(own + group * kOffsetBytes<kTiles> + lane * 8));
    __syncwarp();
  }

  // Tokens looked up one by one, 16-bit loads and stores of norms, all without running ahead.
  static __device__ __noinline__ void copy_scattered(const CodeParams& p, CodeSegments& mine, unsigned char* memory,
                                                     int first, int buffer) {
    const Tbq4View& kv = p.call.kv;
    const ItemRows& item = mine.loaded_item;
    const int lane = ptx::fresh_lane();
    const uint32_t codes = ptx::shared_address(memory) + kPairTableBytes + buffer * 2 * Tile::kBytes;
    const uint32_t norms = ptx::shared_address(memory) + p.at.norms + buffer * 2 * Tile::kNormBytes;
    constexpr int kOfLane = (Tile::kTokens + 31) / 32;  // tokens
    int64_t rows[kOfLane];
    bool all = true;
#pragma unroll
    for (int i = 0; i < kOfLane; ++i) {
      const int token = first + 32 * i + lane;
      const bool wanted = 32 * i + lane < Tile::kTokens && token >= item.begin && token < item.end;
      rows[i] = wanted ? plane_row(p, mine.loaded.sequence.batch, item.kv_head, token).row : -1;
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
    if (!all) mine.lose();
    if (!kv.k_offsets) return;
    const int g = lane / 4, t = lane % 4;
#pragma unroll 1
    for (int i = 0; i < Tile::kTokens; i += 16) {
      int page[2];
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int token = first + i + g + 8 * h;
        const bool wanted = token >= item.begin && token < item.end;
        page[h] = wanted ? static_cast<int>(plane_row(p, mine.loaded.sequence.batch, item.kv_head, token).page) : -1;
      }
      float s[kTiles][4];
      score_pages<D, kTiles>(p, mine.loaded, item, page, s);
#pragma unroll
      for (int n = 0; n < kTiles; ++n)
#pragma unroll
        for (int h = 0; h < 2; ++h)
          store(memory + p.at.offsets + buffer * p.offset_bytes + (i + g + 8 * h) * kOffsetBytes<kTiles> +
                    (8 * n + 2 * t) * 4,
                Vector<float, 2>{s[n][2 * h], s[n][2 * h + 1]});
    }
  }
  static __device__ __forceinline__ void copy_bytes(uint32_t to, const uint8_t* from) {
#pragma unroll 1
    for (int i = 0; i < 16; ++i)
      asm volatile("st.shared.b8 [%0], %1;" ::"r"(to + i), "r"(uint32_t{from[i]}) : "memory");
  }

  CodeSegments& mine_;
  unsigned char* memory_;  // shared
  uint32_t to_, norm_to_;  // where this lane's first piece of a tile's codes, and its piece of norms, go
  int left_ = 0;           // tiles that the segment has left
  bool started_ = false;   // the first segment has been entered
};

}  // namespace flashq::cuda
