// Where the partial results of an item lie.
#pragma once
#include "cuda/decode/plan.cuh"

namespace flashq::cuda {

// In split order: slots first, next, next + step, ...
struct PartialList { int first, next, step, count; };

// Of an item that one worker has whole, count is 1 and `first` is the slot of one that shares it: Partials keeps none.
__device__ __forceinline__ PartialList find_partials(const SplitConfig& c, const Segment& segment, int total) {
  const int units = segment.sequence.units;
  if (!segment.given()) return {};
  if (c.unit_is_split) return {segment.item_base, segment.item_base + 1, 1, units};
  const Shares shares(c, total);
  const int first = segment.item_base + c.item_units, begin = shares.owner(first);
  return {2 * begin + (shares.begin(begin) < segment.item_base), 2 * (begin + 1), 2,
          shares.owner(first + units - 1) - begin + 1};
}

}  // namespace flashq::cuda
