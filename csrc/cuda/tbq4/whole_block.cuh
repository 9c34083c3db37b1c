// The TBQ4 codec with a whole block in the registers of one thread: no shuffles, and every sign known to the compiler,
// which folds it into the operand of an addition. For many blocks at once; lanes.cuh is for few.
//
// Two tables in shared memory hold a copy of each entry for every lane, so look-ups never conflict. Their rows are 256
// bytes apart: the address is one byte permutation of the row's number and the lane's offset.
#pragma once
#include <type_traits>

#include "core/half.h"
#include "core/tbq4/codec.h"
#include "cuda/tbq4/bulk_rows.cuh"

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
constexpr float edge_at(int k) {
  return k == tbq4::kEdges  ? -0.f
         : k < tbq4::kEdges ? -tbq4::kPositiveEdges[tbq4::kEdges - 1 - k]
                            : tbq4::kPositiveEdges[k - tbq4::kEdges - 1];
}

constexpr Cell cell_at(int cell) {
  constexpr float kMargin = 1e-3f;
  const float low = (static_cast<float>(cell - kCellOfZero) - .5f) / kCellsPerLength - kMargin;
  int k = 0;
  while (k < 2 * tbq4::kEdges && edge_at(k) < low) ++k;
  return {edge_at(k), k + 1};
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

struct CellTable { Cell cell[kCells]; };
constexpr CellTable make_cells() {
  CellTable table{};
  for (int i = 0; i < kCells; ++i) table.cell[i] = cell_at(i);
  return table;
}
__constant__ constexpr CellTable kDeviceCells = make_cells();
__constant__ constexpr auto kDeviceSquares = tbq4::kSquares;
__constant__ constexpr tbq4::Table<float, tbq4::kLevels> kDeviceLevels[2] = {tbq4::kCentroids64, tbq4::kCentroids128};

inline constexpr int kCellTableBytes = kCells * kTableRow;

// Every thread of the block takes part in filling a table; the caller synchronises. A store is 16 bytes: 2 or 4 lanes'.
__device__ __forceinline__ void fill_cells(char* table) {  // 8 bytes a lane
  for (int i = static_cast<int>(threadIdx.x); i < kCells * 16; i += static_cast<int>(blockDim.x)) {
    const Cell cell = kDeviceCells.cell[i / 16];
    *reinterpret_cast<float4*>(table + i * 16) =
        make_float4(cell.edge, __int_as_float(cell.above), cell.edge, __int_as_float(cell.above));
  }
}

// Energies of the two codes of a byte, 4 bytes a lane: rows of 256 or, to save room, 128 bytes.
template <int kRow> __device__ __forceinline__ void fill_energies(char* table) {
  for (int i = static_cast<int>(threadIdx.x); i < 256 * 8; i += static_cast<int>(blockDim.x)) {
    const auto square = [](int index) { return kDeviceSquares[index < 8 ? 7 - index : index - 8]; };
    const int both = square(i / 8 % 16) + square(i / 8 / 16);
    *reinterpret_cast<int4*>(table + i / 8 * kRow + i % 8 * 16) = make_int4(both, both, both, both);
  }
}

// The levels of the two codes of a byte, 8 bytes a lane.
template <int kWidth> __device__ __forceinline__ void fill_levels(char* table) {
  for (int i = static_cast<int>(threadIdx.x); i < 256 * 16; i += static_cast<int>(blockDim.x)) {
    const auto& levels = kDeviceLevels[kWidth / 128];
    const float low = levels[i / 16 % 16], high = levels[i / 16 / 16];
    *reinterpret_cast<float4*>(table + i * 16) = make_float4(low, high, low, high);
  }
}

// Where a lane finds row `byte` (0 to 3) of `bytes`: the row's number times 256, plus the lane's offset below 256.
template <int kByte> __device__ __forceinline__ uint32_t table_offset(uint32_t bytes, uint32_t lane_offset) {
  return __byte_perm(bytes, lane_offset, 0x5504 | kByte << 4);
}

template <tbq4::Sign kSign> __device__ __forceinline__ constexpr bool negates(int i) {
  return tbq4::sign_bit<kSign>(i) != 0;
}

template <int kWidth, tbq4::Sign kSign> __device__ __forceinline__ void flip_whole(float (&v)[kWidth]) {
#pragma unroll
  for (int i = 0; i < kWidth; ++i) v[i] = negates<kSign>(i) ? -v[i] : v[i];
}

// core's energy_of. A square of an fp16 value is exact in fp32, so a fused addition rounds as the separate one does.
template <class T, int kCount> __device__ __forceinline__ float energy_part(const float* x) {
  if constexpr (std::is_same_v<T, Float16>) {
    float sums[kCount / 2];
#pragma unroll
    for (int i = 0; i < kCount / 2; ++i) sums[i] = __fmaf_rn(x[2 * i], x[2 * i], ieee::mul(x[2 * i + 1], x[2 * i + 1]));
    return tbq4::tree_sum<kCount / 2>(sums);
  } else {
    return tbq4::energy_of<kCount>(x);
  }
}

template <int kWidth> struct WholeBlock {
  uint32_t codes[kWidth / 8];
  uint16_t norm;
};

// x, whose energy is `squares`, is destroyed. Tables of fill_cells and fill_energies<kEnergyRow>.
template <int kWidth, int kEnergyRow>
__device__ __forceinline__ WholeBlock<kWidth> encode_whole(float (&x)[kWidth], float squares, const char* cells,
                                                           const char* energies) {
  const auto lane = static_cast<uint32_t>(ptx::fresh_lane());
  const float length = ieee::sqrt(squares);
  const float cells_a_unit = __fdividef(kCellsPerLength, length);
  flip_whole<kWidth, tbq4::Sign::kIn>(x);
  tbq4::hadamard<kWidth>(x);

  WholeBlock<kWidth> block;
  int32_t decoded_energy = 0;
#pragma unroll
  for (int j = 0; j < kWidth / 8; ++j) {
    uint32_t word = 0;
#pragma unroll
    for (int i = 7; i >= 0; --i) {
      const float v = negates<tbq4::Sign::kOut>(8 * j + i) ? -x[8 * j + i] : x[8 * j + i];
      // 1.5 * 2^23 + n has n, a small integer, in its lowest byte.
      const float number = __fmaf_rn(v, cells_a_unit, 0x1.8p23f + kCellOfZero);
      const Cell cell = *reinterpret_cast<const Cell*>(cells + table_offset<0>(bits_of(number), lane * 8));
      const float distance = ieee::sub(v, ieee::mul(cell.edge, length));
      word = word * 16 + static_cast<uint32_t>(cell.above + (static_cast<int32_t>(bits_of(distance)) >> 31));
    }
    block.codes[j] = word;
    const auto energy_at = [&](uint32_t offset) {
      return *reinterpret_cast<const int32_t*>(energies + offset / (kTableRow / kEnergyRow));
    };
    const uint32_t lane_offset = lane * 4 * (kTableRow / kEnergyRow);
    decoded_energy += energy_at(table_offset<0>(word, lane_offset)) + energy_at(table_offset<1>(word, lane_offset));
    decoded_energy += energy_at(table_offset<2>(word, lane_offset)) + energy_at(table_offset<3>(word, lane_offset));
  }
  block.norm = tbq4::norm_of<kWidth>(length, decoded_energy);

  const bool poison = !tbq4::is_finite(squares), zero = length <= tbq4::kTiny;
  if (poison || zero) {
#pragma unroll
    for (int j = 0; j < kWidth / 8; ++j) block.codes[j] = poison ? 0 : tbq4::kZeroCodes * 0x01010101u;
    block.norm = poison ? tbq4::kPoisonNorm : 0;
  }
  return block;
}

// Table of fill_levels<kWidth>.
template <int kWidth> __device__ __forceinline__ void decode_whole(const uint32_t (&codes)[kWidth / 8], uint16_t norm,
                                                                   const char* levels, float (&out)[kWidth]) {
  const uint32_t lane_offset = threadIdx.x % 32 * 8;
#pragma unroll
  for (int j = 0; j < kWidth / 8; ++j) {
    const auto pair_at = [&](int i, uint32_t offset) {
      const auto pair = *reinterpret_cast<const float2*>(levels + offset);
      out[8 * j + 2 * i] = pair.x;
      out[8 * j + 2 * i + 1] = pair.y;
    };
    pair_at(0, table_offset<0>(codes[j], lane_offset));
    pair_at(1, table_offset<1>(codes[j], lane_offset));
    pair_at(2, table_offset<2>(codes[j], lane_offset));
    pair_at(3, table_offset<3>(codes[j], lane_offset));
  }
  flip_whole<kWidth, tbq4::Sign::kOut>(out);
  tbq4::hadamard<kWidth>(out);
  const float scale = half_to_float(norm);
#pragma unroll
  for (int i = 0; i < kWidth; ++i) {
    constexpr float kFactor = tbq4::kInvSqrtWidth<kWidth>;
    out[i] = ieee::mul(ieee::mul(out[i], negates<tbq4::Sign::kIn>(i) ? -kFactor : kFactor), scale);
  }
}

}  // namespace flashq::cuda
