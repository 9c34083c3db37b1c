// The plan of dynamic shared memory.
#pragma once
#include "core/softmax_state.h"
#include "cuda/decode/key_stream.cuh"
#include "cuda/tbq4_attention/call.h"
#include "cuda/tbq4_attention/operands.cuh"
#include "cuda/tbq4_attention/tile.cuh"

namespace flashq::cuda {

// Of a row of the item: the keys that it sees within the segment, and from where on it reads them exactly.
struct RowRange { int begin, end, recent; };

// The segment that a warp is loading. In shared memory, because the main loop is short of registers.
struct LoadedSegment {
  Segment segment;
  int kv_head;
  int begin, end;  // keys that are read
  int origin;      // token where the first tile starts
};

// What a warp loads and what it computes: the first runs ahead.
struct CodeSegments {
  LoadedSegment loaded;
  Segment segment;
  ItemRows item;
};

inline constexpr int kOffsetBytes = 512;  // of the pages of a tile: 4 of D 64, 2 of D 128, 1 of D 256

// `rows`: that an item has at most, of 8 * kTiles.
template <int D, int kTiles> SharedPlan lay_out_shared(int warps, int stages, int rows, bool with_offsets) {
  using Tile = CodeTile<D>;
  constexpr int kRows = 8 * kTiles, kQueryBytes = kRows * D * 2;
  const int buffers = warps * stages;
  SharedPlan at{};
  at.codes = kPairTableBytes;
  at.norms = at.codes + buffers * 2 * Tile::kBytes;
  at.offsets = at.norms + buffers * 2 * Tile::kNormBytes;
  at.query = at.offsets + (with_offsets ? buffers * kOffsetBytes : 0);
  at.rest_query = at.query + kQueryBytes;
  at.raw_query = at.rest_query + kQueryBytes;
  at.rest_table = at.raw_query + (with_offsets ? kQueryBytes : 0);
  at.scales = at.rest_table + kRestTableBytes;
  at.offset_scales = at.scales + kRows * 4;
  at.states = at.offset_scales + kRows * 4;
  at.ranges = at.states + warps * kRows * int{sizeof(SoftmaxState<Binary>)};
  at.segments = at.ranges + kRows * int{sizeof(RowRange)};
  at.reach = at.segments + warps * int{sizeof(CodeSegments)};
  at.parked = (at.reach + 4 + 15) / 16 * 16;
  const int results = warps * rows * D * 4 - kPairTableBytes / 2;
  at.end = at.parked + (results > 0 ? results : 0);
  return at;
}

// Four columns of a parked result: (warps, rows, D) floats, chunks of columns exchanged so that fragments are written
// without bank conflicts. result: warp * rows + row.
template <int D> __device__ __forceinline__ float4* parked_at(unsigned char* shared, int parked, int result, int row,
                                                              int column) {
  const int i = (result * (D / 4) + column / 4) ^ (row >> 1 & 3);
  constexpr int kInTable = kPairTableBytes / 2 / 16;
  return reinterpret_cast<float4*>(shared +
                                   (i < kInTable ? i / 8 * 256 + 128 + i % 8 * 16 : parked + (i - kInTable) * 16));
}

}  // namespace flashq::cuda
