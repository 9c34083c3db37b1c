// Rows of an item from its partial results, four columns a thread.
#pragma once
#include "cuda/decode/finish.cuh"
#include "cuda/decode/plan.cuh"

namespace flashq::cuda {

// A row's sums of four columns over some keys.
struct RowPart {
  SoftmaxState<Binary> state;
  float4 o = {};

  // An empty side's sums stay out, whatever they hold.
  __device__ __forceinline__ void merge_with(const RowPart& other) { merge_values(state, o, other.state, other.o); }
};

// Writes out and lse of an item's row at column d.
__device__ __forceinline__ void finish_part(const AttentionParams& p, const SplitConfig& c, const Segment& segment,
                                            const ItemRows& item, int row, int d, const RowPart& part) {
  const int group = c.group_size(), query = c.group.quotient(item.first_row + row);
  finish_values(p, segment.sequence.batch, segment.sequence.q_begin + query,
                item.kv_head * group + item.first_row + row - query * group, d, part.state, part.o);
}

// The parts of `lanes` neighbouring lanes (a power of two), merged; every lane gets the result.
__device__ __forceinline__ RowPart merge_lanes(const RowPart& part, int lanes) {
  float top = part.state.max;
#pragma unroll 1
  for (int step = 1; step < lanes; step *= 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, step));
  const float weight = merge_weight(part.state, top);
  const bool none = part.state.empty();
  float x[5] = {part.state.sum, part.o.x, part.o.y, part.o.z, part.o.w};
#pragma unroll
  for (float& value : x) value = none ? -0.f : value * weight;  // a sum with +0 would lose the sign of a lone -0
#pragma unroll 1
  for (int step = 1; step < lanes; step *= 2)
#pragma unroll
    for (float& value : x) value += __shfl_xor_sync(~0u, value, step);
  return {{top, x[0]}, {x[1], x[2], x[3], x[4]}};
}

}  // namespace flashq::cuda
