// Tables in shared memory, for kernels that encode or decode many blocks.
//
// A row holds copies of one entry, so that look-ups never conflict: loads of 8 bytes are served for half a warp at a
// time and need 16 copies, loads of 4 bytes need 32; either is 128 bytes. Rows are 256 bytes apart: then the address is
// one byte permutation of the row's number and the lane's offset.
#pragma once
#include "core/tbq4/codec.h"
#include "cuda/vector.cuh"

namespace flashq::cuda {

inline constexpr int kTableRow = 256;  // bytes

// Encoding: cells of 1/4 of the block's length over all that a rotated value can be, sqrt(128) lengths to either side.
// At most one of the 15 edges lies in a cell, or a little outside of it. The cell of a value is found with rounding
// errors far smaller than that, and the comparison with the cell's edge, which is exact, decides.
inline constexpr int kCellsPerLength = 4, kCellOfZero = 46, kCells = 2 * kCellOfZero + 1;

struct alignas(8) Cell {
  float edge;     // of a block of length 1
  int32_t above;  // index of values >= edge; those below have the one before
};

// Edge 0 is -0: v - (-0) has no sign bit for either zero v, which both count as >= 0.
FLASHQ_HD constexpr float edge_at(int k) {
  constexpr auto edges = tbq4::kPositiveEdges;
  return k == tbq4::kEdges ? -0.f : k < tbq4::kEdges ? -edges[tbq4::kEdges - 1 - k] : edges[k - tbq4::kEdges - 1];
}

FLASHQ_HD constexpr Cell cell_at(int cell) {
  constexpr float kMargin = 1e-3f;
  const float low = (static_cast<float>(cell - kCellOfZero) - .5f) / kCellsPerLength - kMargin;
  Cell found{edge_at(0), 1};
  FLASHQ_UNROLL
  for (int k = 0; k < 2 * tbq4::kEdges; ++k)
    if (edge_at(k) < low) found = {edge_at(k + 1), k + 2};
  return found;
}

constexpr bool cells_hold_one_edge() {
  for (int cell = 0; cell < kCells; ++cell) {
    const float high = (static_cast<float>(cell - kCellOfZero) + .5f) / kCellsPerLength + 1e-3f;
    const int next = cell_at(cell).above;
    if (next <= 2 * tbq4::kEdges && edge_at(next) <= high) return false;
  }
  return true;
}
static_assert(cells_hold_one_edge());
static_assert(kCellOfZero * kCellOfZero > 128 * kCellsPerLength * kCellsPerLength);
static_assert(kCells <= 256);

// The number of a code among the positive levels, and one of eight values, by selects: an array that a lane indexes
// would lie in memory.
__device__ __forceinline__ int magnitude_of(int code) { return code < 8 ? 7 - code : code - 8; }
template <class T> __device__ __forceinline__ T pick(int m, T a, T b, T c, T d, T e, T f, T g, T h) {
  const T low = m & 2 ? (m & 1 ? d : c) : (m & 1 ? b : a), high = m & 2 ? (m & 1 ? h : g) : (m & 1 ? f : e);
  return m & 4 ? high : low;
}
__device__ __forceinline__ int32_t square_of(int code) {
  constexpr auto q = tbq4::kSquares;
  return pick(magnitude_of(code), q[0], q[1], q[2], q[3], q[4], q[5], q[6], q[7]);
}
template <int kWidth> __device__ __forceinline__ float level_of(int code) {
  constexpr auto c = kWidth == 64 ? tbq4::kCentroids64 : tbq4::kCentroids128;
  const float level = pick(magnitude_of(code), c[8], c[9], c[10], c[11], c[12], c[13], c[14], c[15]);
  return code < 8 ? -level : level;
}

inline constexpr int kTableBytes = 256 * kTableRow, kCopyBytes = kTableRow / 2;

// Fills 128 bytes of a row with copies of 16. The lanes of a warp, each with a row of its own, start in different
// banks.
__device__ __forceinline__ void fill_copies(char* to, uint4 copies) {
#pragma unroll
  for (int i = 0; i < kCopyBytes / kVectorBytes; ++i)
    *reinterpret_cast<uint4*>(to + (i + threadIdx.x) % 8 * kVectorBytes) = copies;
}

// Every thread of the block takes part in filling a table; the caller synchronises. Everything is worked out: lanes
// that read constant memory here stalled for an eighth of a launch.
//
// For encoding. The first half of a row is a cell, the second the energy of the two codes of a byte.
__device__ __forceinline__ void fill_encoding(char* table) {
  const auto threads = static_cast<int>(blockDim.x), thread = static_cast<int>(threadIdx.x);
  for (int row = thread; row < 256; row += threads) {
    const uint32_t both = square_of(row % 16) + square_of(row / 16);
    fill_copies(table + row * kTableRow + kCopyBytes, make_uint4(both, both, both, both));
  }
  for (int row = threads - 1 - thread; row < kCells; row += threads) {
    const Cell cell = cell_at(row);
    const auto above = static_cast<uint32_t>(cell.above);
    fill_copies(table + row * kTableRow, make_uint4(bits_of(cell.edge), above, bits_of(cell.edge), above));
  }
}

// For decoding: the levels of the two codes of a byte. Two threads fill a row.
template <int kWidth> __device__ __forceinline__ void fill_levels(char* table) {
  for (int i = static_cast<int>(threadIdx.x); i < 512; i += static_cast<int>(blockDim.x)) {
    const int row = i / 2;
    const uint32_t low = bits_of(level_of<kWidth>(row % 16)), high = bits_of(level_of<kWidth>(row / 16));
    char* const to = table + row * kTableRow;
#pragma unroll
    for (int j = 0; j < 4; ++j)
      *reinterpret_cast<uint4*>(to + (2 * j + i) % 8 * kVectorBytes) = make_uint4(low, high, low, high);
  }
}

// Where a lane finds row `byte` (0 to 3) of `bytes`: the row's number times 256, plus the lane's offset below 256.
template <int kByte> __device__ __forceinline__ uint32_t table_offset(uint32_t bytes, uint32_t lane_offset) {
  return __byte_perm(bytes, lane_offset, 0x5504 | kByte << 4);
}

}  // namespace flashq::cuda
