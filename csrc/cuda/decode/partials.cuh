// Partial results of split-KV attention in the call's scratch, and how the merge finds them.
#pragma once
#include "core/softmax_state.h"
#include "params.h"

namespace flashq::cuda {

// An item whose keys were split. Its partials, in split order, lie at slots `first`, `next`, next + step, ...
struct SplitItem {
  int32_t batch, token;  // of the sequence's first query token: in packed queries `token` counts all tokens
  int32_t first_row;     // counted from that token: row r is head r % group of token r / group
  int32_t kv_head, rows;
  int32_t first, next, step, count;
};

// The items that start in a CTA and end in another one, or, where every unit is a split, that have several. The first
// stands here, because it is mostly the only one, and the merge would wait for another read.
struct ItemList {
  int32_t count, more;  // the others: items[more + 1], items[more + 2], ...
  SplitItem first;
};

// A slot is (block_rows, head_dim) sums o, not divided by anything, and (block_rows) states; max is in base 2.
struct Partials {
  ItemList* lists;  // (CTAs)
  SplitItem* items;
  SoftmaxState<Binary>* states;
  float* o;
  int32_t block_rows, head_dim;

  __device__ __forceinline__ SoftmaxState<Binary>& state(int slot, int row) const {
    return states[int64_t{slot} * block_rows + row];
  }
  __device__ __forceinline__ float* row(int slot, int row) const {
    return o + (int64_t{slot} * block_rows + row) * head_dim;
  }
};

}  // namespace flashq::cuda
