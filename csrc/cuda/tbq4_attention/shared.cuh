// The plan of dynamic shared memory.
#pragma once
#include "core/softmax_state.h"
#include "cuda/decode/key_stream.cuh"
#include "cuda/ptx/fresh_thread.cuh"
#include "cuda/tbq4_attention/call.h"
#include "cuda/tbq4_attention/operands.cuh"
#include "cuda/tbq4_attention/tile.cuh"

namespace flashq::cuda {

inline constexpr int kCodeStages = 3;  // tiles of a warp's ring; more gain nothing

// Tiles of a segment all of whose tokens all rows see: `count` of them, and `behind` others after them.
struct alignas(8) ClearTiles { int behind, count; };

// What a warp loads and what it computes: the first runs ahead. In shared memory, because the main loop is short of
// registers.
struct CodeSegments {
  Segment loaded, segment;
  ItemRows loaded_item, item;
  float reach;  // of the queries of `item`: the largest length times the scale
  bool more;    // there may be a segment behind the loaded one
  ClearTiles clear;
  bool complete;      // all tokens that some row sees have been there so far
  uint32_t rows[32];  // of the planes, of groups of 16 tokens that are to be loaded; kNowhere: not there
  int pages[32];      // of those groups, where there are offsets

  // A token that some row sees is not there: from now on every tile is looked at.
  __device__ __forceinline__ void lose() {
    complete = false;
    clear.count = 0;
  }
};
inline constexpr uint32_t kNowhere = ~0u;

// What offsets add to the scores of each row, of a token or of a group of 16 tokens on one page.
template <int kTiles> inline constexpr int kOffsetBytes = 8 * kTiles * 4;
inline constexpr int kOffsetGroups = 16;  // that are worked out at once

// Of a buffer of a ring.
template <int D, int kTiles> FLASHQ_HD constexpr int offset_bytes(bool whole_groups) {
  return (whole_groups ? CodeTile<D>::kGroups : CodeTile<D>::kTokens) * kOffsetBytes<kTiles>;
}

// `rows`: that an item has at most, of 8 * kTiles. offset_bytes: of a buffer; 0: there are no offsets.
template <int D, int kTiles> SharedPlan lay_out_shared(int warps, int rows, int offset_bytes) {
  using Tile = CodeTile<D>;
  const int buffers = warps * kCodeStages;
  SharedPlan at{};
  at.norms = kPairTableBytes + buffers * 2 * Tile::kBytes;
  at.offsets = at.norms + buffers * 2 * Tile::kNormBytes;
  at.next_offsets = at.offsets + buffers * offset_bytes;
  at.states = at.next_offsets + (offset_bytes > 0 ? warps * kOffsetGroups * kOffsetBytes<kTiles> : 0);
  at.segments = at.states + (warps + 1) * rows * int{sizeof(SoftmaxState<Binary>)};
  at.end = at.segments + warps * int{sizeof(CodeSegments)};
  return at;
}

// The unused halves of the table's rows, 32 KiB: the rests of queries (queries.cuh), a warp's after the other's.
template <int D, int kTiles> __device__ __forceinline__ unsigned char* rests_of_warp(unsigned char* shared, int warp) {
  return shared + warp * (8 * kTiles * D * 2 / 128) * 256 + 128;
}
// Where this lane's words 4 i .. 4 i + 3 stand there; `word` is 4 i.
template <int D> __device__ __forceinline__ int rest_at(int word) {
  const int at = word / 4 * 512 + ptx::fresh_lane() * 16;
  return at / 128 * 256 + at % 128;
}

}  // namespace flashq::cuda
