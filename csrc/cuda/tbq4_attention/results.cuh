// What a warp has of a segment, on its way to memory, and the merge of what a cluster's warps have of an item. All of
// it is still rotated.
#pragma once
#include "cuda/decode/cluster_item.cuh"
#include "cuda/tbq4_attention/rotation.cuh"
#include "cuda/tbq4_attention/shared.cuh"
#include "cuda/tbq4_attention/weights.cuh"

namespace flashq::cuda {

// Sums over all lanes of a row, brought to [1, 2) by a power of two that moves to the base: both then lose nothing in
// the logarithm. acc[n][i] has dims 2 i, 2 i + 1 of the lane's in [c] and [2 + c]; `unit` multiplies it. Calls
// state(row, its state) in one lane, and values(row, column, four) for each four columns.
template <int D, int kTiles, int kAcc, class State, class Values>
__device__ __forceinline__ void write_results(int rows, const LaneStates<kTiles>& of,
                                              const float (&acc)[kTiles][kAcc][4], float unit, State state,
                                              Values values) {
  using Tile = CodeTile<D>;
  constexpr int kLaneDims = Tile::kWidth / 8;  // of a block
  const int lane = ptx::fresh_lane(), g = lane / 4, t = lane % 4;
#pragma unroll
  for (int n = 0; n < kTiles; ++n)
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      const int row = 8 * n + 2 * t + c;
      float sum = of.sum[n][c];
#pragma unroll
      for (int step = 4; step < 32; step *= 2) sum += __shfl_xor_sync(~0u, sum, step);
      if (row >= rows) continue;
      const int exponent = min_of(max_of(static_cast<int>(bits_of(sum) >> 23 & 255) - 127, -125), 125);
      const float shrink = float_of(static_cast<uint32_t>(127 - exponent) << 23), factor = shrink * unit;
      if (g == 0) state(row, SoftmaxState<Binary>{of.base[n][c] + static_cast<float>(exponent), sum * shrink});
#pragma unroll
      for (int i = 0; i < kAcc; i += 2) {
        const int block = 2 * i / kLaneDims, column = block * Tile::kWidth + g * kLaneDims + 2 * i % kLaneDims;
        values(row, column,
               float4{acc[n][i][c] * factor, acc[n][i][2 + c] * factor, acc[n][i + 1][c] * factor,
                      acc[n][i + 1][2 + c] * factor});
      }
    }
}

// Where warps park the results of an item, in place of their rings: (rows, D) floats each, chunks of columns exchanged
// so that fragments are written without bank conflicts.
template <int D> class ParkedCodes {
 public:
  __device__ __forceinline__ ParkedCodes(const CodeParams& p, unsigned char* shared)
      : rings_(shared + kPairTableBytes),
        rows_(p.rows),
        states_(reinterpret_cast<SoftmaxState<Binary>*>(shared + p.at.states)) {}

  // Four columns from `column` on.
  __device__ __forceinline__ float4& values(int warp, int row, int column) const {
    auto* own = reinterpret_cast<float4*>(rings_ + warp * kRingBytes<D>);
    return own[(row * (D / 4) + column / 4) ^ (row >> 1 & 3)];
  }
  __device__ __forceinline__ SoftmaxState<Binary>& state(int warp, int row) const {
    return states_[warp * rows_ + row];
  }

 private:
  unsigned char* rings_;
  int rows_;
  SoftmaxState<Binary>* states_;
};

// Merges the parked results of a cluster and writes out and lse; all of its threads call it. `parked` are this CTA's,
// of `warps` warps.
template <int D> __device__ __forceinline__ void merge_parked(const CodeParams& p, const Segment& segment,
                                                              const ItemRows& item, const ParkedCodes<D>& parked,
                                                              int warps, int rank) {
  constexpr int kWidth = CodeTile<D>::kWidth, kQuarter = D / 4;
  const int ctas = p.cluster_ctas, columns = item.rows * kQuarter;
  const auto thread = static_cast<int>(threadIdx.x), threads = static_cast<int>(blockDim.x);
  const int own = static_cast<int>(blockDim.x) / 32;  // the place of this CTA's states
  const auto finish = [&](int row, int column, const RowPart& sum) {
    if (row < item.rows) finish_part(p.call, p.split, segment, item, row, column, sum);
  };
  __syncthreads();
#pragma unroll 1
  for (int base = 0; base < columns; base += threads) {
    const int i = base + thread, wanted = i / kQuarter, row = min_of(wanted, item.rows - 1), column = i % kQuarter * 4;
    if (ctas > 1 && wanted >= item.rows) continue;  // nor reads what another thread writes below
    RowPart sum;
#pragma unroll 4
    for (int warp = 0; warp < warps; ++warp) sum.state.max = fmaxf(sum.state.max, parked.state(warp, row).max);
#pragma unroll 4
    for (int warp = 0; warp < warps; ++warp) {
      const SoftmaxState<Binary> part = parked.state(warp, row);
      if (part.empty()) continue;  // whatever its sums hold
      const float weight = exp2f(part.max - sum.state.max);
      const float4 o = parked.values(warp, row, column);
      sum.state.sum += weight * part.sum;
      sum.o = {fmaf(weight, o.x, sum.o.x), fmaf(weight, o.y, sum.o.y), fmaf(weight, o.z, sum.o.z),
               fmaf(weight, o.w, sum.o.w)};
    }
    if (ctas == 1) {
      rotate_fours<kWidth, true>(sum.o);
      finish(wanted, column, sum);
    } else {
      parked.values(0, row, column) = sum.o;
      if (column == 0) parked.state(own, row) = sum.state;
    }
  }
  if (ctas == 1) return;
  ptx::sync_cluster();
  // A warp finishes 128 columns.
#pragma unroll 1
  for (int unit = rank + thread / 32 * ctas; unit * 32 < columns; unit += own * ctas) {
    const int i = unit * 32 + thread % 32, wanted = i / kQuarter, row = min_of(wanted, item.rows - 1);
    const int column = i % kQuarter * 4;
    const uint32_t values_at = ptx::shared_address(&parked.values(0, row, column));
    // Lane k of 16 has CTA k's state of their row.
    float state[2];
    ptx::load_from_block(state, ptx::shared_address(&parked.state(own, row)), thread & (ctas - 1));
    RowPart sum;
    sum.state.max = state[0];
#pragma unroll
    for (int step = 1; step < 16; step *= 2) {
      const float other = __shfl_xor_sync(~0u, sum.state.max, step);
      if (step < ctas) sum.state.max = fmaxf(sum.state.max, other);
    }
    const float weight = merge_weight(SoftmaxState<Binary>{state[0], state[1]}, sum.state.max);
    sum.state.sum = weight * state[1];
#pragma unroll 8
    for (int k = 0; k < ctas; ++k) {
      float o[4];
      ptx::load_from_block(o, values_at, k);
      const float part = __shfl_sync(~0u, weight, (thread & 16) | k);
      if (part == 0) continue;  // NaN weighs NaN
      sum.o = {fmaf(part, o[0], sum.o.x), fmaf(part, o[1], sum.o.y), fmaf(part, o[2], sum.o.z),
               fmaf(part, o[3], sum.o.w)};
    }
#pragma unroll
    for (int step = 1; step < 16; step *= 2) {
      const float other = __shfl_xor_sync(~0u, sum.state.sum, step);
      if (step < ctas) sum.state.sum += other;
    }
    rotate_fours<kWidth, true>(sum.o);
    finish(wanted, column, sum);
  }
  ptx::sync_cluster();  // nobody reads a block's shared memory that has ended
}

}  // namespace flashq::cuda
