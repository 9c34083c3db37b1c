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

// `count` parts merged, in their order: state_of(k) and values_of(k) are those of part k.
template <class StateOf, class ValuesOf>
__device__ __forceinline__ RowPart merge_parts(int count, StateOf state_of, ValuesOf values_of) {
  float top = -kInf;
#pragma unroll 4
  for (int k = 0; k < count; ++k) top = fmaxf(top, state_of(k).max);
  float x[5] = {-0.f, -0.f, -0.f, -0.f, -0.f};  // a sum with +0 would lose the sign of a lone -0
#pragma unroll 4
  for (int k = 0; k < count; ++k) {
    const SoftmaxState<Binary> state = state_of(k);
    const float4 o = values_of(k);
    const float part[5] = {state.sum, o.x, o.y, o.z, o.w}, weight = merge_weight(state, top);
#pragma unroll
    for (int i = 0; i < 5; ++i) x[i] += state.empty() ? -0.f : part[i] * weight;
  }
  return {{top, x[0]}, {x[1], x[2], x[3], x[4]}};
}

}  // namespace flashq::cuda
