// Masks of scores in the accumulators of a tensor core product, mma.sync and wgmma alike: of a row, a thread has
// columns 8 j + e (j = 0, 1, ...; e = 0, 1), counted from its first one. Masks name them by bit 2 j + e.
#pragma once
#include "core/portability.h"

namespace flashq::cuda {

// How many of the columns are below x.
__device__ __forceinline__ int columns_below(int x) { return min(max(2 * (x >> 3) + min(x & 7, 2), 0), 32); }

// Those in [begin, end).
__device__ __forceinline__ uint32_t columns_in(int begin, int end) {
  const uint32_t from = __funnelshift_lc(0, ~0u, columns_below(begin));  // shifts by 32 too
  return from & ~__funnelshift_lc(0, ~0u, columns_below(end));
}

// Scores of the columns that are not visible become -inf. score(i): that of the column named by bit i.
template <int kColumns, class Score> __device__ __forceinline__ void mask_scores(uint32_t visible, Score score) {
  static_assert(kColumns <= 32);
#pragma unroll
  for (int i = 0; i < kColumns; ++i) {
    float& x = score(i);
    x = visible >> i & 1 ? x : -kInf;
  }
}

}  // namespace flashq::cuda
