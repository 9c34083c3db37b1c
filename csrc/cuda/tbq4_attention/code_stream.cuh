// Codes and norms on their way into shared memory: every warp has a ring of tiles and fills it ahead of its arithmetic,
// across the ends of segments.
//
// Tokens that no row of the item sees, and those on pages that do not exist, are not read; whatever lies in their place
// is a code, which is finite, or a norm, which the arithmetic leaves out.
#pragma once
#include "cuda/tbq4_attention/offsets.cuh"

namespace flashq::cuda {

// The page of an entry of a sequence's table, or -1. kNow: read past the L1.
template <bool kNow = false>
__device__ __forceinline__ int64_t page_of_entry(const CodeParams& p, int sequence, int entry) {
  const Tbq4View& kv = p.call.kv;
  if (!kv.block_table.given()) return sequence;
  const int64_t page = kNow ? load_past_l1(kv.block_table, sequence, entry) : kv.block_table(sequence, entry);
  return page >= 0 && page < kv.num_pages ? page : -1;
}

// Where a token lies: its page, and its row of the planes (page, KV head, slot). -1: its page does not exist.
struct PlaneRow { int64_t page, row; };

template <bool kNow = false>
__device__ __forceinline__ PlaneRow plane_row(const CodeParams& p, int sequence, int kv_head, int token) {
  const Tbq4View& kv = p.call.kv;
  const int entry = kv.block_table.given() ? p.page_size.quotient(token) : 0;
  const int64_t page = page_of_entry<kNow>(p, sequence, entry);
  if (page < 0) return {-1, -1};
  const int slot = token - entry * static_cast<int>(p.page_size.value);
  return {page, (page * p.call.query.kv_heads + kv_head) * kv.page_size + slot};
}

// kEarly: tables are read past the L1, because the kernel before this one may still be writing them.
template <int D, bool kEarly> class CodeStream {
  using Tile = CodeTile<D>;
  static constexpr int kLanes = 32 / Tile::kGroups;                // that copy the same 16 tokens
  static constexpr int kNormChunks = 16 * Tile::kBlocks * 2 / 16;  // of 16 tokens
  static constexpr int kBatch = 32 / Tile::kGroups;                // tiles that are looked up at once

 public:
  __device__ __forceinline__ CodeStream(const CodeParams& p, CodeSegments& mine, unsigned char* memory)
      : mine_(mine), memory_(memory), own_(p, mine, memory) {}
  // Keeps what follows from the lane's number in registers: called once, before the first load_next().
  __device__ __forceinline__ void pin() { own_.pin(); }
  // Goes on where another one with the same `mine` and `memory` has looked ahead.
  __device__ __forceinline__ void resume() {
    ready_ = mine_.left > 0 ? batch_at(mine_.left) : 1;
    row_ = next_row();
  }

  // Looks up the first tiles of mine.loaded.segment, as the first load_next() would: whole groups.
  __device__ __forceinline__ void look_ahead(const CodeParams& p) { refill(p, 0); }
  // Whether the table has changed since.
  __device__ __forceinline__ bool outdated(const CodeParams& p) const {
    bool wanted = false;
    return static_cast<uint32_t>(find_group(p, mine_.left, wanted).row) != mine_.rows[ptx::fresh_lane()];
  }

  // Starts the copy of this warp's next tile to a slot. Past the last tile it only ends a group of copies.
  __device__ __forceinline__ void load_next(const CodeParams& p, uint32_t slot) {
    if (ready_ == 0) [[unlikely]]
      refill(p, slot);
    copy(slot);
    --ready_;
    row_ = next_row();
    ptx::cp_async_commit();
  }

 private:
  // Where this lane's first pieces of a tile's codes, and its piece of norms if it has one, come from, and where in a
  // slot they go; and where rows of its groups stand.
  struct Pieces {
    const uint8_t *k_from, *v_from;
    const unsigned char* norms_from;
    uint32_t to, norms_to, rows_at;

    __device__ __forceinline__ Pieces(const CodeParams& p, const CodeSegments& mine, const unsigned char* memory) {
      const Tbq4View& kv = p.call.kv;
      const uint32_t lane = ptx::fresh_lane(), group = lane / kLanes, chunk = lane % kLanes, part = chunk % kNormChunks;
      const uint32_t shared = ptx::shared_address(memory);
      const bool of_k = chunk < kNormChunks;
      k_from = kv.k_codes + chunk * 16;
      v_from = kv.v_codes + chunk * 16;
      norms_from = reinterpret_cast<const unsigned char*>(of_k ? kv.k_norms : kv.v_norms) + part * 16;
      to = shared + Tile::swizzle(group * (Tile::kBytes / Tile::kGroups) + chunk * 16);
      norms_to = shared + 2 * Tile::kBytes + (of_k ? 0 : Tile::kNormBytes) + (group * kNormChunks + part) * 16;
      if (chunk >= 2 * kNormChunks) norms_to = 0;
      rows_at = static_cast<uint32_t>(reinterpret_cast<const unsigned char*>(mine.rows + group) - memory);
    }
    // Keeps them in registers: else they are worked out again for every tile.
    __device__ __forceinline__ void pin() {
      asm volatile("" : "+l"(k_from), "+l"(v_from), "+l"(norms_from));
      asm volatile("" : "+r"(to), "+r"(norms_to), "+r"(rows_at));
    }
  };
  __device__ __forceinline__ uint32_t next_row() const {
    return load<uint32_t>(memory_ + own_.rows_at + (kBatch - ready_) * (Tile::kGroups * 4));
  }

  // How many tiles are looked up at once where so many are left: from there on they are multiples of kBatch.
  static __device__ __forceinline__ int batch_at(int left) { return (left - 1) % kBatch + 1; }
  // The next tiles: looks up where they lie, or loads one whose tokens have to be looked up one by one.
  __device__ __forceinline__ void refill(const CodeParams& p, uint32_t slot) {
    const bool whole_groups = p.whole_groups;
    int left = mine_.left;
    if (left > 0) left -= whole_groups ? batch_at(left) : 1;
    if (left == 0) left = advance(p);
    publish(mine_.left, left);
    ready_ = whole_groups && left > 0 ? batch_at(left) : 1;
    look_up(p, left, whole_groups);
    if (!whole_groups && left > 0) copy_scattered(p, mine_, memory_, next_token(left), slot);
    row_ = next_row();
  }

  // To the next segment; how many tiles it has: at least one, even if it sees no token, or none behind the last.
  __device__ __forceinline__ int advance(const CodeParams& p) {
    const int entered = mine_.entered;
    SegmentRows& loaded = mine_.loaded;
    if (entered > 0) {
      if (!loaded.segment.given()) return 0;
      publish(loaded.segment, next_segment(p.call, p.split, loaded.segment));
    }
    publish(loaded.item, ItemRows(p.call, p.split, loaded.segment));
    copy_words(mine_.waiting[entered % kWaiting], loaded);
    publish(mine_.entered, entered + 1);
    const ItemRows& item = loaded.item;
    const int tiles = (item.end - (item.begin & -Tile::kTokens) + Tile::kTokens - 1) / Tile::kTokens;
    return loaded.segment.given() ? max_of(tiles, 1) : 0;
  }
  // Where a tile starts, from how many tiles there are from it on.
  __device__ __forceinline__ int next_token(int left) const {
    return ((mine_.loaded.item.end + Tile::kTokens - 1) / Tile::kTokens - left) * Tile::kTokens;
  }

  // Where this lane's group of 16 tokens of the next tiles lies.
  __device__ __forceinline__ PlaneRow find_group(const CodeParams& p, int left, bool& wanted) const {
    const int token = next_token((left + kBatch - 1) / kBatch * kBatch) + ptx::fresh_lane() * 16;
    const ItemRows& item = mine_.loaded.item;
    wanted = left > 0 && token < item.end && token + 16 > item.begin;
    return wanted ? plane_row<kEarly>(p, mine_.loaded.segment.sequence.batch, item.kv_head, token) : PlaneRow{-1, -1};
  }
  // Where the groups of 16 tokens of the next tiles lie, up to a multiple of kBatch from the segment's end: tables are
  // read once for many tiles, and only where a token is seen. Offsets of their pages are on their way from here on.
  __device__ __forceinline__ void look_up(const CodeParams& p, int left, bool whole_groups) {
    const int lane = ptx::fresh_lane();
    bool wanted = false;
    const PlaneRow at = find_group(p, whole_groups ? left : 0, wanted);
    const int64_t row = at.row;
    __syncwarp();
    mine_.rows[lane] = static_cast<uint32_t>(row);  // fewer than 2^32 - 1
    if (wanted && row < 0) mine_.lose();
    if (row >= 0 && p.call.kv.k_offsets) [[unlikely]] {
#pragma unroll
      for (int d = 0; d < D; d += 64) ptx::prefetch_l2(offset_of_page(p, at.page, mine_.loaded.item.kv_head) + d);
    }
    __syncwarp();
  }

  __device__ __forceinline__ void copy(uint32_t slot) const {
    const bool there = row_ != kNowhere;
    const uint8_t* const k = own_.k_from + uint64_t{row_} * Tile::kTokenBytes;
    const uint8_t* const v = own_.v_from + uint64_t{row_} * Tile::kTokenBytes;
    const uint32_t to = own_.to + slot;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      // i * kLanes chunks are other bits of the place than those in to_, so their exchanges can be combined.
      constexpr uint32_t kInLine = 127;
      const uint32_t at = (to ^ (Tile::swizzle(i * kLanes * 16) & kInLine)) + i * kLanes * 16;
      ptx::cp_async_16_if(there, at, k + i * kLanes * 16);
      ptx::cp_async_16_if(there, at + Tile::kBytes, v + i * kLanes * 16);
    }
    ptx::cp_async_16_if(there && own_.norms_to != 0, own_.norms_to + slot,
                        own_.norms_from + uint64_t{row_} * (Tile::kBlocks * 2));
  }

  // Tokens looked up one by one, 16-bit loads and stores of norms, all without running ahead.
  static __device__ __noinline__ void copy_scattered(const CodeParams& p, CodeSegments& mine, unsigned char* memory,
                                                     int first, uint32_t slot) {
    const Tbq4View& kv = p.call.kv;
    const ItemRows& item = mine.loaded.item;
    const int lane = ptx::fresh_lane();
    const uint32_t codes = ptx::shared_address(memory) + slot, norms = codes + 2 * Tile::kBytes;
    constexpr int kOfLane = (Tile::kTokens + 31) / 32;  // tokens
    int64_t rows[kOfLane];
    bool all = true;
#pragma unroll
    for (int i = 0; i < kOfLane; ++i) {
      const int token = first + 32 * i + lane;
      const bool wanted = 32 * i + lane < Tile::kTokens && token >= item.begin && token < item.end;
      rows[i] = wanted ? plane_row(p, mine.loaded.segment.sequence.batch, item.kv_head, token).row : -1;
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
  }
  static __device__ __forceinline__ void copy_bytes(uint32_t to, const uint8_t* from) {
#pragma unroll 1
    for (int i = 0; i < 16; ++i)
      asm volatile("st.shared.b8 [%0], %1;" ::"r"(to + i), "r"(uint32_t{from[i]}) : "memory");
  }

  CodeSegments& mine_;
  unsigned char* memory_;  // shared
  Pieces own_;
  uint32_t row_ = kNowhere;  // of the next tile
  int ready_ = 0;            // tiles that have been looked up
};

}  // namespace flashq::cuda
