// Which keys are read from the exact pool instead of the codes.
#pragma once
#include "cuda/tbq4_attention/call.h"

namespace flashq::cuda {

// Tokens that some row of an item reads exactly, where the pool holds them; counted like the item's keys.
struct ExactRanges {
  int lead_end, recent_begin;

  __device__ __forceinline__ ExactRanges(const CodeParams& p, const Segment& segment, const ItemRows& item)
      : lead_end(0), recent_begin(item.end) {
    if (!p.exact) return;
    const ExactRule rule{p.call.kv.exact_first, p.call.kv.exact_last};
    const Mask mask = segment.sequence.mask(p.call.score);
    const auto in_item = [&](int64_t key) { return static_cast<int>(clamp(key, item.begin, item.end)); };
    lead_end = in_item(rule.leading(mask).end);
    recent_begin = in_item(rule.recent(mask, item.first_query).begin);
  }
};

// The page of the exact pool that has a token, or -1.
__device__ __forceinline__ int64_t exact_page(const CodeParams& p, int sequence, int token) {
  const KvView& pool = p.call.kv.exact;
  const int entry = p.exact_page_size.quotient(token);
  if (pool.page_size == 0 || entry >= pool.max_pages) return -1;
  const int64_t page = pool.block_table(sequence, entry);
  return page >= 0 && page < pool.num_pages ? page : -1;
}

}  // namespace flashq::cuda
