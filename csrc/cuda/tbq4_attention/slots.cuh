// Where partial results of a call lie: every segment has a slot, because the merge finishes all rows.
//
// Where the plan's units are splits, unit u of an item has slot item_base + u. Else a worker has two: 2 * worker for
// its first segment, and 2 * worker + 1 for its last, if that is another one. Items that one worker has whole follow,
// each with a slot of its own, and then results of exact tokens, `exact_parts` for each item.
#pragma once
#include "cuda/tbq4_attention/call.h"

namespace flashq::cuda {

// Items that a call has at most.
inline int64_t most_items(const QueryView& q, int64_t block_rows) {
  return count_row_tiles(q, block_rows) * q.kv_heads;
}

// A number of an item, below most_items() and different from those of others.
__device__ __forceinline__ int item_number(const AttentionParams& p, const SplitConfig& c, const Segment& s) {
  const PlannedSequence& sequence = s.sequence;
  if (!p.query.cu_seqlens_q.given()) return sequence.batch * sequence.items(p.query) + s.item;
  // Of the sequences before it those with tokens, at most one a token, have each one item more than whole ones.
  const int before =
      c.block_rows.quotient(sequence.q_begin * c.group_size()) + min_of(sequence.batch, sequence.q_begin);
  return before * static_cast<int>(p.query.kv_heads) + s.item;
}

__device__ __forceinline__ int slot_of_whole(const AttentionParams& p, const SplitConfig& c, const Segment& s) {
  return 2 * c.workers + item_number(p, c, s);
}
__device__ __forceinline__ int slot_of(const CodeParams& p, const Segment& s, int worker, bool first_segment) {
  if (p.split.unit_is_split) return s.item_base + s.lo;
  return s.whole() ? slot_of_whole(p.call, p.split, s) : 2 * worker + !first_segment;
}

// Of the plan's item `number`.
__device__ __forceinline__ int slot_of_exact(const CodeParams& p, int number, int part) {
  return p.exact_slot + number * p.exact_parts + part;
}

}  // namespace flashq::cuda
