// Partial results of split-KV attention in the call's scratch.
#pragma once
#include "core/softmax_state.h"
#include "params.h"

namespace flashq::cuda {

// A slot is (block_rows, head_dim) sums o, not divided by anything, and (block_rows) states; max is in base 2.
//
// Where the plan's units are splits, unit u of an item has slot item_base + u. Else a worker has two slots: 2 * worker
// for its first segment, and 2 * worker + 1 for its last, if that is another one. Workers of a CTA that merge what they
// have of an item leave one result, in the first slot of the first of them. Items that a worker, or such a group, has
// whole need none.
struct Partials {
  SoftmaxState<Binary>* states;  // null: nothing is split
  float* o;
  int32_t block_rows, head_dim;

  FLASHQ_HD bool given() const { return states != nullptr; }
  __device__ __forceinline__ SoftmaxState<Binary>& state(int slot, int row) const {
    return states[int64_t{slot} * block_rows + row];
  }
  __device__ __forceinline__ float* row(int slot, int row) const {
    return o + (int64_t{slot} * block_rows + row) * head_dim;
  }
};

}  // namespace flashq::cuda
