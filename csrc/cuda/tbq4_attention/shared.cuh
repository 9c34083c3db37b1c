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

// Tiles of a segment all of whose tokens all rows see: `count` of them, and `behind` others after them. The last tile
// ends at `end`, and what offsets add to scores is there for tokens below `scored`.
struct alignas(16) ClearTiles { int behind, count, end, scored; };

struct SegmentRows {
  Segment segment;
  ItemRows item;
};
inline constexpr int kWaiting = 4;  // segments: with a tile each, the stream is this many minus two ahead at most

// What a warp loads and what it computes: the first runs ahead. In shared memory, because the main loop is short of
// registers.
struct CodeSegments : SegmentRows {  // of what it computes
  SegmentRows loaded, waiting[kWaiting];
  int entered, begun;  // segments, by the stream and by the arithmetic; behind the last there is one that is not given
  int left;            // tiles that the loaded segment had left when they were looked up last
  ClearTiles range;
  bool rests;         // what fp16 has left of the queries is there
  int first_entry;    // of the table, whose offset is the first that scores are there for
  uint32_t held[2];   // a bit for each group of 16 leading or recent tokens: the exact pool holds it
  bool complete;      // all tokens that some row sees have been there so far
  uint32_t rows[36];  // of the planes, of groups of 16 tokens that are to be loaded, 32 of them; kNowhere: not there

  // A token that some row sees is not there: from now on every tile is looked at.
  __device__ __forceinline__ void lose() {
    complete = false;
    range.count = 0;
  }
};
inline constexpr uint32_t kNowhere = ~0u;

// All lanes of a warp copy what they can all read afterwards.
template <class X> __device__ __forceinline__ void copy_words(X& to, const X& from) {
  constexpr int kWords = sizeof(X) / 4;
  static_assert(kWords <= 32 && sizeof(X) % 4 == 0);
  const int lane = ptx::fresh_lane();
  __syncwarp();
  if (lane < kWords) reinterpret_cast<uint32_t*>(&to)[lane] = reinterpret_cast<const uint32_t*>(&from)[lane];
  __syncwarp();
}

// What the offset of a page adds to the scores of each row.
template <int kTiles> inline constexpr int kOffsetBytes = 8 * kTiles * 4;
inline constexpr int kOffsetPages = 16;  // that are worked out at once

// Of a warp's ring.
template <int D> inline constexpr int kRingBytes = kCodeStages * CodeTile<D>::kSlotBytes;

// `rows`: that an item has at most, of 8 * kTiles.
template <int D, int kTiles> SharedPlan lay_out_shared(int warps, int rows, bool offsets) {
  SharedPlan at{};
  at.offsets = kPairTableBytes + warps * kRingBytes<D>;
  at.states = at.offsets + (offsets ? warps * kOffsetPages * kOffsetBytes<kTiles> : 0);
  at.segments =
      round_up(at.states + (warps + 1) * rows * int{sizeof(SoftmaxState<Binary>)}, int{alignof(CodeSegments)});
  at.end = at.segments + warps * int{sizeof(CodeSegments)};
  return at;
}

// The unused halves of the table's rows, 32 KiB: queries of warps on their way to registers, and then, where they are
// needed, what fp16 has left of them (queries.cuh).
template <int D, int kTiles> __device__ __forceinline__ unsigned char* queries_of_warp(unsigned char* shared,
                                                                                       int warp) {
  return shared + warp * (8 * kTiles * D * 2 / 128) * 256 + 128;
}

}  // namespace flashq::cuda
