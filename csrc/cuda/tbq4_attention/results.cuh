// Results of a segment: each warp parks its own, then they are merged, in the order of the warps.
#pragma once
#include "cuda/decode/finish.cuh"
#include "cuda/tbq4_attention/queries.cuh"

namespace flashq::cuda {

// What a lane has of a warp's rows 8 n + 2 t + c: weights are relative to 2^base, sums are its own keys' part.
template <int kTiles> struct LaneStates {
  float base[kTiles][2], sum[kTiles][2];

  __device__ __forceinline__ LaneStates() {
#pragma unroll
    for (int n = 0; n < kTiles; ++n)
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        base[n][c] = -kInf;
        sum[n][c] = 0;
      }
  }

  // Weights of a row are relative to 2^to from now on, those of the past too: acc[.][c] and [.][2 + c] are its sums.
  template <int kAcc> __device__ __forceinline__ void move_base(int n, int c, float to, float (&acc)[kAcc][4]) {
    const float shrink = ptx::exp2_approx(base[n][c] - to);
    base[n][c] = to;
    sum[n][c] *= shrink;
#pragma unroll
    for (int i = 0; i < kAcc; ++i) {
      acc[i][c] *= shrink;
      acc[i][2 + c] *= shrink;
    }
  }
};

// Sums over all lanes of a row, brought to [1, 2) by a power of two that moves to the base: both then lose nothing in
// the logarithm. acc[n][i] has dims 2 i, 2 i + 1 of the lane's in [c] and [2 + c]; `unit` multiplies it.
template <int D, int kTiles, int kAcc>
__device__ __forceinline__ void park(unsigned char* shared, const SharedPlan& at, int warp, int rows,
                                     LaneStates<kTiles>& state, const float (&acc)[kTiles][kAcc][4], float unit) {
  using Tile = CodeTile<D>;
  constexpr int kLaneDims = Tile::kWidth / 8;  // of a block
  const int lane = static_cast<int>(threadIdx.x) % 32, g = lane / 4, t = lane % 4;
#pragma unroll
  for (int n = 0; n < kTiles; ++n)
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      const int row = 8 * n + 2 * t + c;
      float sum = state.sum[n][c];
#pragma unroll
      for (int step = 4; step < 32; step *= 2) sum += __shfl_xor_sync(~0u, sum, step);
      if (row >= rows) continue;
      const int exponent = min_of(max_of(static_cast<int>(bits_of(sum) >> 23 & 255) - 127, -125), 125);
      const float shrink = float_of(static_cast<uint32_t>(127 - exponent) << 23);
      if (g == 0)
        reinterpret_cast<SoftmaxState<Binary>*>(
            shared + at.states)[warp * rows + row] = {state.base[n][c] + static_cast<float>(exponent), sum * shrink};
      const float factor = shrink * unit;
#pragma unroll
      for (int i = 0; i < kAcc; i += 2) {
        const int block = 2 * i / kLaneDims, column = block * Tile::kWidth + g * kLaneDims + 2 * i % kLaneDims;
        *parked_at<D>(shared, at.parked, warp * rows + row, row,
                      column) = {acc[n][i][c] * factor, acc[n][i][2 + c] * factor, acc[n][i + 1][c] * factor,
                                 acc[n][i + 1][2 + c] * factor};
      }
    }
}

// Merges the parked results of the warps, all at once, in their order, and calls finish(row, column, state, 8 values).
// `rotated`: they still have to be rotated back.
template <int D, int kTiles, class Finish>
__device__ __forceinline__ void merge_parked(unsigned char* shared, const SharedPlan& at, int rows, bool rotated,
                                             Finish finish) {
  using Tile = CodeTile<D>;
  using Lanes = BlockLanes<Tile::kWidth>;
  constexpr int kUnits = 32 / Lanes::kLanes;  // of a warp: blocks of rows
  const Lanes lanes;
  const int warps = static_cast<int>(blockDim.x) / 32, step = static_cast<int>(blockDim.x) / Lanes::kLanes;
  const int units = (rows * Tile::kBlocks + kUnits - 1) / kUnits * kUnits;
  const auto* states = reinterpret_cast<const SoftmaxState<Binary>*>(shared + at.states);
#pragma unroll 1
  for (int unit = static_cast<int>(threadIdx.x) / Lanes::kLanes; unit < units; unit += step) {
    const int wanted = unit / Tile::kBlocks, row = min_of(wanted, rows - 1);
    const int column = unit % Tile::kBlocks * Tile::kWidth + lanes.lane() * 8;
    SoftmaxState<Binary> state;
#pragma unroll 4
    for (int warp = 0; warp < warps; ++warp) state.max = fmaxf(state.max, states[warp * rows + row].max);
    float x[8] = {};
#pragma unroll 4
    for (int warp = 0; warp < warps; ++warp) {
      const int result = warp * rows + row;
      const SoftmaxState<Binary> part = states[result];
      if (part.empty()) continue;  // whatever its sums hold
      const float weight = exp2f(part.max - state.max);
      state.sum += weight * part.sum;
      const float4 o[2] = {*parked_at<D>(shared, at.parked, result, row, column),
                           *parked_at<D>(shared, at.parked, result, row, column + 4)};
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        x[4 * i] = fmaf(weight, o[i].x, x[4 * i]);
        x[4 * i + 1] = fmaf(weight, o[i].y, x[4 * i + 1]);
        x[4 * i + 2] = fmaf(weight, o[i].z, x[4 * i + 2]);
        x[4 * i + 3] = fmaf(weight, o[i].w, x[4 * i + 3]);
      }
    }
    if (rotated) lanes.template rotate<true>(x);
    __syncwarp();  // finish() may overwrite what other lanes have read
    if (wanted < rows) finish(row, column, state, x);
  }
}

}  // namespace flashq::cuda
