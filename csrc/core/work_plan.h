// How the keys of one sequence are split among units of work.
//
// The rule looks at nothing but the sequence itself, so its rows' bits depend neither on batch mates nor on the number
// of threads. Split boundaries are absolute multiples of the split length, counted from position 0.
#pragma once
#include "core/mask.h"

namespace flashq {

struct SplitPlan {
  int64_t keys = 64;             // of a split, a multiple of 64
  int64_t first = 0, count = 1;  // splits that hold visible keys; one, empty, where there are none

  FLASHQ_HD KeyRange range(int64_t split) const { return {(first + split) * keys, (first + split + 1) * keys}; }
};

inline constexpr int64_t kMaxSplits = 64;         // of a sequence, unless kv_chunk asks for more
inline constexpr int64_t kMaxPartialRows = 4096;  // rows * splits of a KV head: bounds the scratch of long prompts
inline constexpr int64_t kMaxSplitRows = 1024;    // more rows than this keep every core busy without splits

// `rows` of a KV head (query tokens * group) see keys in `seen`. A unit is worth about the same work whatever the rows.
FLASHQ_HD SplitPlan plan_splits(KeyRange seen, int64_t rows, int64_t kv_chunk) {
  SplitPlan plan;
  const int64_t span = seen.size();
  if (kv_chunk > 0) {
    plan.keys = kv_chunk;
  } else if (rows > kMaxSplitRows) {
    plan.keys = max_of<int64_t>(round_up(max_of<int64_t>(seen.end, 0), 64), 64);
  } else {
    const int64_t few = span <= 8192 ? 512 : 1024;
    const int64_t wanted = rows <= 16 ? few : rows <= 64 ? 1024 : rows <= 256 ? 2048 : 4096;
    const int64_t most = min_of(kMaxSplits, max_of<int64_t>(kMaxPartialRows / rows, 1));
    plan.keys = max_of(wanted, round_up(ceil_div(span, most), 64));
  }
  if (span > 0) {
    plan.first = seen.begin / plan.keys;
    plan.count = ceil_div(seen.end, plan.keys) - plan.first;
  }
  return plan;
}

}  // namespace flashq
