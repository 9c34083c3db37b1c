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

// What a warp loads and what it computes: the first runs ahead.
struct CodeSegments {
  LoadedSegment loaded;
  Segment segment;
  ItemRows item;
};

// Byte offsets. The table of pairs comes first.
template <int D, int kTiles> struct CodeShared {
  using Tile = CodeTile<D>;
  static constexpr int kRows = 8 * kTiles;
  static constexpr int kOffsetBytes = 512;           // of the pages of a tile: 4 of D 64, 2 of D 128, 1 of D 256
  static constexpr int kQueryBytes = kRows * D * 2;  // in fragments

  int codes, norms, offsets;         // rings: (warps, stages)
  int query, rest_query, raw_query;  // kQueryBytes each
  int rest_table;
  int scales, offset_scales;  // (kRows) floats
  int states, ranges;         // (warps, kRows), (kRows)
  int segments, reach;        // (warps), a word
  int parked, end;            // results that do not fit the unused halves of the table's rows

  // `rows`: that an item has at most.
  FLASHQ_HD CodeShared(int warps, int stages, int rows, bool with_offsets) {
    const int buffers = warps * stages;
    codes = kPairTableBytes;
    norms = codes + buffers * 2 * Tile::kBytes;
    offsets = norms + buffers * 2 * Tile::kNormBytes;
    query = offsets + (with_offsets ? buffers * kOffsetBytes : 0);
    rest_query = query + kQueryBytes;
    raw_query = rest_query + kQueryBytes;
    rest_table = raw_query + (with_offsets ? kQueryBytes : 0);
    scales = rest_table + kRestTableBytes;
    offset_scales = scales + kRows * 4;
    states = offset_scales + kRows * 4;
    ranges = states + warps * kRows * int{sizeof(SoftmaxState<Binary>)};
    segments = ranges + kRows * int{sizeof(RowRange)};
    reach = segments + warps * int{sizeof(CodeSegments)};
    parked = (reach + 4 + 15) / 16 * 16;
    const int results = warps * rows * D * 4 - kPairTableBytes / 2;
    end = parked + (results > 0 ? results : 0);
  }
};

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
