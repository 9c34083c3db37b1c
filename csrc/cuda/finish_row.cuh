// The end of a row, whichever kernel has its accumulators: sinks, no visible key, one visible key.
#pragma once
#include "core/softmax_state.h"

namespace flashq::cuda {

// Of a row of a tile; heads and queries count from wherever the tile does.
struct RowPlace { int query, head; };

struct FinishedRow {
  float lse, scale;  // out = scale * accumulator
  bool zero;         // whatever the accumulator holds
};

// `sees`: the row sees some key. `sink` is in natural units, -inf: none.
__device__ __forceinline__ FinishedRow finish_row(SoftmaxState<Binary> state, float sink, bool sees) {
  if (!sees) return {sink, 0, true};
  float weight = 1;
  if (sink != -kInf) weight = merge(state, SoftmaxState<Binary>{sink * kLog2E, 1}).a;
  return {state.lse(), weight / state.sum, false};  // of nothing but -inf scores: -inf, and 0 / 0
}

// Rows that see one key, and no sink, get its value as it is: sums would lose the sign of a -0. By whole warps: lane i
// passes the value of row i, or null where there is nothing to copy. copy(row, value).
template <class Copy> __device__ __forceinline__ void copy_lone_values(const uint16_t* own, Copy copy) {
  for (unsigned rows = __ballot_sync(~0u, own != nullptr); rows; rows &= rows - 1) {
    const int row = __ffs(static_cast<int>(rows)) - 1;
    copy(row, reinterpret_cast<const uint16_t*>(__shfl_sync(~0u, reinterpret_cast<uintptr_t>(own), row)));
  }
}

}  // namespace flashq::cuda
