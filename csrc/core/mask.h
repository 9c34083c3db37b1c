// Which keys a query sees: always one interval, because length, kv_start, causality and windows all cut from its ends.
#pragma once
#include "core/portability.h"

namespace flashq {

inline constexpr int64_t kUnlimited = -1;  // of a window

struct KeyRange {  // [begin, end)
  int64_t begin, end;

  FLASHQ_HD bool empty() const { return begin >= end; }
  FLASHQ_HD int64_t size() const { return empty() ? 0 : end - begin; }
};

FLASHQ_HD KeyRange intersect(KeyRange a, KeyRange b) { return {max_of(a.begin, b.begin), min_of(a.end, b.end)}; }

// The mask of one sequence. Bottom-right: query i stands at position p = kv_len - q_len + i, which may be negative.
struct Mask {
  int64_t q_len, kv_len, kv_start;
  int64_t window_left, window_right;  // inclusive, or kUnlimited
  bool causal;                        // the same as window_right = 0

  FLASHQ_HD int64_t position(int64_t query) const { return kv_len - q_len + query; }

  FLASHQ_HD KeyRange visible(int64_t query) const {
    const int64_t p = position(query);
    KeyRange r{kv_start, kv_len};
    if (window_left != kUnlimited) r.begin = max_of(r.begin, p - window_left);
    const int64_t right = causal ? 0 : window_right;
    if (right != kUnlimited) r.end = min_of(r.end, p + right + 1);
    return r;
  }

  // The union over queries [first, last]; the ranges slide by one key a query, so it is an interval too.
  FLASHQ_HD KeyRange visible(int64_t first, int64_t last) const { return {visible(first).begin, visible(last).end}; }
};

// Which of its visible keys a query of tbq4_attention reads exactly, where the exact pool holds them.
struct ExactRule {
  int64_t first = 0, last = 0;  // tokens from kv_start on; tokens up to and including the query's own position

  FLASHQ_HD bool any() const { return first > 0 || last > 0; }
  FLASHQ_HD KeyRange leading(const Mask& mask) const { return {0, mask.kv_start + first}; }
  FLASHQ_HD KeyRange recent(const Mask& mask, int64_t query) const {
    return {last > 0 ? mask.position(query) - last + 1 : mask.kv_len, mask.kv_len};
  }
};

// Bit i: key first_key + i, of the 64 keys of a tile, lies in the range.
FLASHQ_HD uint64_t tile_bits(KeyRange range, int64_t first_key) {
  const int64_t begin = max_of<int64_t>(range.begin - first_key, 0), end = min_of<int64_t>(range.end - first_key, 64);
  if (begin >= end) return 0;
  const uint64_t from = ~uint64_t{0} << begin;
  return end == 64 ? from : from & ~(~uint64_t{0} << end);
}

}  // namespace flashq
