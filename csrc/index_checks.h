// Which values the index tensors of a call may have, once for every device (docs/contract.md, line 9): the CPU refuses
// others, CUDA clamps and skips them, and reports them under FLASHQ_CHECK=1.
//
// For the parameters of every op that takes index tensors there are
//   int64_t count_items(p): tokens of an append, sequences of other ops
//   IndexFault check_item(p, i): offsets, lengths and slots of item i
//   IndexFault check_pages(p, i, first, step): entries first, first + step, ... of those that the block table of
//     sequence i has to have; every check_item() has passed
#pragma once
#include <string>

#include "core/mask.h"
#include "core/tbq4/page_offsets.h"
#include "params.h"

namespace flashq {

// A value that has to lie in [least, most] and does not, or none.
struct IndexFault {
  enum What : int32_t {
    kNone,
    kSlot,
    kExactSlot,
    kPosition,
    kLength,
    kAppendedLength,
    kStart,
    kPage,
    kOffset,
    kQueryOffset,
    kKeyOffset,
  };
  What what = kNone;
  int64_t index = 0, entry = 0;  // of a page: its row of the table and its column
  int64_t got = 0, least = 0, most = 0;

  FLASHQ_HD bool found() const { return what != kNone; }

  // "block_table[3, 1]"
  [[nodiscard]] std::string argument() const {
    constexpr const char* kNames[] = {"",           "slots",        "exact_slots", "positions",
                                      "seqlens",    "seqlens",      "kv_start",    "block_table",
                                      "cu_seqlens", "cu_seqlens_q", "cu_seqlens_k"};
    std::string text = kNames[what];
    text.append("[").append(std::to_string(index));
    if (what == kPage) text.append(", ").append(std::to_string(entry));
    return text.append("]");
  }
  [[nodiscard]] std::string expected() const {
    const std::string low = std::to_string(least), high = std::to_string(most);
    switch (what) {
      case kSlot:
      case kExactSlot: return "a slot below the cache's " + std::to_string(most + 1) + " (or negative: skip)";
      case kLength: return "a length from 0 to the capacity of " + high;
      case kAppendedLength: return "at least the " + low + " keys of this append";
      case kStart: return "a value from 0 to the length " + high;
      case kPosition: return "a position from 0 to " + high + ", as cos and sin have";
      case kPage: return "a page from 0 to " + high;
      default: return index == 0 ? low : "a value from " + low + " (the one before) to " + high + " (all tokens)";
    }
  }
};

FLASHQ_HD IndexFault check_value(const IndexFault& value) {
  return value.got < value.least || value.got > value.most ? value : IndexFault{};
}

// Where packed sequence b of `batch` ends, and for the first one where it begins.
FLASHQ_HD IndexFault check_offsets(IndexFault::What what, const IndexView& cu, int64_t b, int64_t batch,
                                   int64_t tokens) {
  if (b == 0 && cu(0) != 0) return {.what = what, .got = cu(0)};
  if (b >= batch) return {};
  return check_value({.what = what, .index = b + 1, .got = cu(b + 1), .least = cu(b), .most = tokens});
}

FLASHQ_HD IndexFault check_length(const IndexView& seqlens, const IndexView& kv_start, int64_t b, int64_t capacity) {
  const int64_t length = seqlens(b);
  const IndexFault fault = check_value({.what = IndexFault::kLength, .index = b, .got = length, .most = capacity});
  if (fault.found() || !kv_start.given()) return fault;
  return check_value({.what = IndexFault::kStart, .index = b, .got = kv_start(b), .most = length});
}

FLASHQ_HD IndexFault check_page(const IndexView& table, int64_t b, int64_t entry, int64_t num_pages) {
  return check_value(
      {.what = IndexFault::kPage, .index = b, .entry = entry, .got = table(b, entry), .most = num_pages - 1});
}

// --- appends ---------------------------------------------------------------------------------------------------------

template <class P>
concept AppendParams = requires(const P& p) { p.source.slots; };

template <AppendParams P> FLASHQ_HD int64_t count_items(const P& p) { return p.source.tokens; }
FLASHQ_HD IndexFault check_slot(IndexFault::What what, const IndexView& slots, int64_t token, int64_t num_pages,
                                int64_t page_size) {
  return check_value({.what = what,
                      .index = token,
                      .got = slots(token),
                      .least = INT64_MIN,
                      .most = capacity_of(num_pages, page_size) - 1});
}
template <AppendParams P> FLASHQ_HD IndexFault check_item(const P& p, int64_t token) {
  return check_slot(IndexFault::kSlot, p.source.slots, token, p.num_pages, p.page_size);
}
FLASHQ_HD IndexFault check_item(const Tbq4RopeAppendParams& p, int64_t token) {
  const int64_t last = p.rotary.max_position - 1;
  IndexFault fault =
      check_value({.what = IndexFault::kPosition, .index = token, .got = p.positions(token), .most = last});
  if (!fault.found()) fault = check_slot(IndexFault::kSlot, p.source.slots, token, p.num_pages, p.page_size);
  if (fault.found() || !p.exact.slots.given()) return fault;
  return check_slot(IndexFault::kExactSlot, p.exact.slots, token, p.exact.num_pages, p.exact.page_size);
}

// --- attention -------------------------------------------------------------------------------------------------------

template <class P>
concept AttentionOpParams = requires(const P& p) { p.query.cu_seqlens_q; };

// The mask of a sequence of a cache op.
FLASHQ_HD Mask mask_of(const AttentionParams& p, int64_t sequence) {
  const IndexView& cu = p.query.cu_seqlens_q;
  return {.q_len = cu.given() ? cu(sequence + 1) - cu(sequence) : p.query.q_len,
          .kv_len = p.seqlens(sequence),
          .kv_start = p.kv_start.given() ? p.kv_start(sequence) : 0,
          .window_left = p.score.window_left,
          .window_right = p.score.window_right,
          .causal = p.score.causal};
}

// Whether some query of the sequence reads one of `tokens`, all visible to some query, from the codes.
FLASHQ_HD bool reads_codes(const Tbq4View& kv, const Mask& mask, int64_t sequence, KeyRange tokens) {
  const ExactRule rule{kv.exact_first, kv.exact_last};
  if (!rule.any()) return true;
  const int64_t last_query = mask.q_len - 1;
  // What lies between the leading tokens and the last query's recent ones. A window narrower than exact_last leaves
  // nothing between them for any query.
  const KeyRange between{rule.leading(mask).end, rule.last > 0 ? rule.recent(mask, last_query).begin : mask.kv_len};
  const bool narrow = mask.window_left != kUnlimited && mask.window_left < rule.last;
  if (!narrow && !intersect(tokens, between).empty()) return true;
  for (int64_t t = tokens.begin; t < tokens.end; ++t)
    if (!kv.exact.holds(sequence, t)) return true;
  return false;
}
FLASHQ_HD bool reads_codes(const KvView&, const Mask&, int64_t, KeyRange) { return true; }

// One at least: cu_seqlens of no sequences have a first element.
template <AttentionOpParams P> FLASHQ_HD int64_t count_items(const P& p) {
  return max_of<int64_t>(p.query.batch, p.query.cu_seqlens_q.given());
}
template <AttentionOpParams P> FLASHQ_HD IndexFault check_item(const P& p, int64_t b) {
  const QueryView& q = p.query;
  IndexFault fault;
  if (q.cu_seqlens_q.given())
    fault = check_offsets(IndexFault::kQueryOffset, q.cu_seqlens_q, b, q.batch, q.total_tokens);
  if constexpr (requires { p.kv.cu_seqlens_k; })
    if (!fault.found() && p.kv.cu_seqlens_k.given())
      fault = check_offsets(IndexFault::kKeyOffset, p.kv.cu_seqlens_k, b, q.batch, p.kv.page_size);
  if (fault.found() || !p.seqlens.given() || b >= q.batch) return fault;
  return check_length(p.seqlens, p.kv_start, b, kv_capacity(p.kv));
}
template <AttentionOpParams P>
FLASHQ_HD IndexFault check_pages(const P& p, int64_t b, int64_t first, int64_t step) {
  if (!p.kv.block_table.given() || b >= p.query.batch) return {};
  const Mask mask = mask_of(p, b);
  const KeyRange seen = mask.q_len > 0 ? mask.visible(0, mask.q_len - 1) : KeyRange{0, 0};
  if (seen.empty()) return {};
  const int64_t page_size = p.kv.page_size;
  for (int64_t i = seen.begin / page_size + first; i <= (seen.end - 1) / page_size; i += step) {
    const IndexFault fault = check_page(p.kv.block_table, b, i, p.kv.num_pages);
    if (fault.found() && reads_codes(p.kv, mask, b, intersect(seen, {i * page_size, (i + 1) * page_size})))
      return fault;
  }
  return {};
}

// --- tbq4_page_offsets_ ----------------------------------------------------------------------------------------------

FLASHQ_HD int64_t count_items(const PageOffsetsParams& p) { return max_of<int64_t>(p.batch, 1); }
FLASHQ_HD IndexFault check_item(const PageOffsetsParams& p, int64_t b) {
  IndexFault fault = check_offsets(IndexFault::kOffset, p.cu_seqlens, b, p.batch, p.tokens);
  if (fault.found() || b >= p.batch) return fault;
  fault = check_length(p.seqlens, p.kv_start, b, capacity_of(p.max_pages, p.page_size));
  if (fault.found()) return fault;
  return check_value({.what = IndexFault::kAppendedLength,
                      .index = b,
                      .got = p.seqlens(b),
                      .least = p.cu_seqlens(b + 1) - p.cu_seqlens(b),
                      .most = INT64_MAX});
}
FLASHQ_HD IndexFault check_pages(const PageOffsetsParams& p, int64_t b, int64_t first, int64_t step) {
  if (b >= p.batch) return {};
  const int64_t length = p.seqlens(b), added = p.cu_seqlens(b + 1) - p.cu_seqlens(b);
  const tbq4::OffsetRule rule{length - added, length, p.kv_start.given() ? p.kv_start(b) : 0, p.page_size};
  const KeyRange opened = rule.opened_pages();
  for (int64_t i = opened.begin + first; i < opened.end; i += step)
    if (const IndexFault fault = check_page(p.block_table, b, i, p.num_pages); fault.found()) return fault;
  return {};
}

}  // namespace flashq
