// Who computes what in split-KV attention: planned on the device, from the lengths, without the host.
//
// The keys that a sequence sees are cut into units. Units are numbered over (sequence, KV head, block of rows, unit),
// and every CTA takes an equal, contiguous range of the numbers, so it shares at most two items, its first and its
// last, with other CTAs: an item is a (sequence, KV head, block of rows). Nothing here knows how keys are stored.
#pragma once
#include "cuda/sequences.cuh"

namespace flashq::cuda {

// Numbers of tokens, rows and units are 32-bit here: fits_plan() says which calls they are enough for.
struct SplitConfig {
  int32_t capacity;     // tokens that a sequence has room for
  Divisor unit;         // tokens of a unit; units start at its multiples
  Divisor group;        // query heads of a KV head
  Divisor block_rows;   // rows of an item at most: a row is a query token of one head of the group
  int32_t least_units;  // of a CTA: with fewer its warps would idle
  bool unit_is_split;   // each unit is a partial result of its own (kv_chunk), not each CTA's share of an item

  FLASHQ_HD int group_size() const { return static_cast<int>(group.value); }
};

inline bool fits_plan(const AttentionParams& p, int64_t capacity, int64_t least_unit, int64_t least_rows) {
  constexpr double kMost = 0x1p31 - 0x1p12;
  const QueryView& q = p.query;
  const auto tokens = static_cast<double>(capacity), batch = static_cast<double>(q.batch);
  const double rows = static_cast<double>(q.total_tokens) * static_cast<double>(q.q_heads);
  const double items = batch * static_cast<double>(q.kv_heads) + rows / static_cast<double>(least_rows);
  return tokens <= kMost && rows <= kMost && batch <= kMost &&
         items * (tokens / static_cast<double>(least_unit) + 1) <= kMost;
}

__device__ __forceinline__ int divide_down(int a, int b) {
  return static_cast<int>(static_cast<uint32_t>(a) / static_cast<uint32_t>(b));
}

// A sequence, and what it adds to the plan.
struct PlannedSequence {
  int batch, q_begin, q_len, kv_len, kv_start;
  int first_unit, units;  // that hold keys some row sees
  int row_blocks;         // items of each KV head

  __device__ __forceinline__ Mask mask(const ScoreOptions& o) const {
    return {.q_len = q_len,
            .kv_len = kv_len,
            .kv_start = kv_start,
            .window_left = o.window_left,
            .window_right = o.window_right,
            .causal = o.causal};
  }
  __device__ __forceinline__ int items(const QueryView& q) const { return row_blocks * static_cast<int>(q.kv_heads); }
};

// Query tokens [q_begin, q_end) of sequence b, or none where b is past the last one.
__device__ __forceinline__ PlannedSequence plan_sequence(const AttentionParams& p, const SplitConfig& c, int b,
                                                         int q_begin, int q_end) {
  PlannedSequence s{.batch = b, .q_begin = q_begin, .q_len = q_end - q_begin};
  if (b >= p.query.batch || s.q_len <= 0) return s;
  s.kv_len = static_cast<int>(clamp(p.seqlens(b), 0, c.capacity));
  if (p.kv_start.given()) s.kv_start = static_cast<int>(clamp(p.kv_start(b), 0, s.kv_len));
  const KeyRange seen = s.mask(p.score).visible(0, s.q_len - 1);
  if (seen.empty()) return s;
  s.first_unit = c.unit.quotient(static_cast<int>(seen.begin));
  s.units = c.unit.quotient(static_cast<int>(seen.end - 1)) + 1 - s.first_unit;
  s.row_blocks = c.block_rows.quotient(s.q_len * c.group_size() + static_cast<int>(c.block_rows.value) - 1);
  return s;
}

// Calls body(sequence of this lane) for 32 sequences at a time, until it returns true; all lanes take part. Returns
// where the tokens of the last sequence end.
template <class Body>
__device__ __forceinline__ int scan_sequences(const AttentionParams& p, const SplitConfig& c, Body body) {
  const QueryView& q = p.query;
  const int lane = static_cast<int>(threadIdx.x) % 32, batch = static_cast<int>(q.batch);
  int before = 0;  // query tokens of earlier sequences, where they are packed
  for (int base = 0; base < batch; base += 32) {
    const int b = base + lane;
    int begin = 0, end = static_cast<int>(q.q_len);
    if (q.cu_seqlens_q.given()) {
      end = b < batch ? static_cast<int>(clamp(q.cu_seqlens_q(b + 1), before, q.total_tokens)) : before;
      end = scan_warp(end, [](int x, int y) { return max_of(x, y); });
      begin = __shfl_up_sync(~0u, end, 1);
      if (lane == 0) begin = before;
      before = __shfl_sync(~0u, end, 31);
    }
    if (body(plan_sequence(p, c, b, begin, end))) break;
  }
  return q.cu_seqlens_q.given() ? before : static_cast<int>(q.total_tokens);
}

// Units [lo, hi) of one item: what a CTA computes before it writes a result.
struct Segment {
  PlannedSequence sequence;
  int item;       // of the sequence: KV head * row blocks + row block
  int item_base;  // number of the item's first unit in the plan
  int lo, hi;     // counted from that
  int left;       // units of the CTA behind this segment

  __device__ __forceinline__ bool given() const { return hi > 0; }
  __device__ __forceinline__ bool whole() const { return lo == 0 && hi == sequence.units; }
};

// The units of one CTA.
struct CtaShare {
  int total;  // units of the plan
  int ctas;   // that have work

  // First unit of a CTA, floor(total * cta / ctas), and the CTA that has a unit.
  __device__ __forceinline__ int begin(int cta) const {
    const int each = divide_down(total, ctas);
    return each * cta + divide_down((total - each * ctas) * cta, ctas);
  }
  __device__ __forceinline__ int owner(int unit) const {
    return static_cast<int>(((int64_t{unit} + 1) * ctas - 1) / total);
  }
};

__device__ __forceinline__ Segment cut_segment(const SplitConfig& c, Segment s, int lo, int count) {
  s.lo = lo;
  s.hi = min_of(s.sequence.units, lo + (c.unit_is_split ? 1 : count));
  s.left = count - (s.hi - lo);
  return s;
}

// The one behind it, or one that is not given().
__device__ __forceinline__ Segment next_segment(const AttentionParams& p, const SplitConfig& c, Segment s) {
  if (s.left <= 0) return {};
  if (s.hi < s.sequence.units) return cut_segment(c, s, s.hi, s.left);
  s.item_base += s.sequence.units;
  if (++s.item == s.sequence.items(p.query)) {
    s.item = 0;
    const IndexView& cu = p.query.cu_seqlens_q;
    do {
      const int b = s.sequence.batch + 1, begin = cu.given() ? s.sequence.q_begin + s.sequence.q_len : 0;
      const int end = static_cast<int>(cu.given() ? clamp(cu(b + 1), begin, p.query.total_tokens) : p.query.q_len);
      s.sequence = plan_sequence(p, c, b, begin, end);
    } while (s.sequence.units == 0);
  }
  return cut_segment(c, s, 0, s.left);
}

// The share of this CTA and its first segment, which is not given() if there is none. On the way, tokens that see
// nothing get their results: fill(batch, token, padding) is called by a whole warp, for its share of them.
template <class Fill> __device__ __forceinline__ Segment plan_cta(const AttentionParams& p, const SplitConfig& c,
                                                                  CtaShare& share, Fill fill) {
  const int warps = static_cast<int>(blockDim.x) / 32, grid_warps = static_cast<int>(gridDim.x) * warps;
  const int cta = static_cast<int>(blockIdx.x), warp = cta * warps + static_cast<int>(threadIdx.x) / 32;
  Segment found{};
  int total = 0, unit = 0;
#pragma unroll 1
  for (bool locating = false;; locating = true) {  // once to count the units, once to find where this CTA starts
    int base = 0;
    const int end = scan_sequences(p, c, [&](const PlannedSequence& mine) {
      const int own = mine.units * mine.items(p.query);
      unsigned chosen;  // lanes with sequences that see nothing, or with the CTA's first unit
      if (!locating) {
        total += own;
        chosen = __ballot_sync(~0u, mine.batch < p.query.batch && mine.units == 0 && mine.q_len > 0);
      } else {
        const int upto = base + scan_warp(own, [](int x, int y) { return x + y; });
        chosen = __ballot_sync(~0u, upto > unit);
        base = __shfl_sync(~0u, upto, 31);
        found.item_base = upto - own;
      }
#pragma unroll 1
      for (; chosen; chosen &= chosen - 1) {
        const int lane = __ffs(static_cast<int>(chosen)) - 1;
        const auto from = [lane](int x) { return __shfl_sync(~0u, x, lane); };
        PlannedSequence& s = found.sequence;
        s = {from(mine.batch),    from(mine.q_begin),    from(mine.q_len), from(mine.kv_len),
             from(mine.kv_start), from(mine.first_unit), from(mine.units), from(mine.row_blocks)};
        if (locating) {
          const int first = from(found.item_base);
          found.item = divide_down(unit - first, s.units);
          found.item_base = first + found.item * s.units;
          return true;
        }
        const int turn = s.batch % grid_warps;
#pragma unroll 1
        for (int i = warp >= turn ? warp - turn : warp - turn + grid_warps; i < s.q_len; i += grid_warps)
          fill(s.batch, s.q_begin + i, false);
      }
      return false;
    });
    if (locating) break;
#pragma unroll 1
    for (int t = end + warp; t < p.query.total_tokens; t += grid_warps) fill(0, t, true);
    share.total = __reduce_add_sync(~0u, total);
    share.ctas = max_of(min_of(divide_down(share.total, c.least_units), static_cast<int>(gridDim.x)), 1);
    if (share.total == 0 || cta >= share.ctas) return {};
    unit = share.begin(cta);
  }
  return cut_segment(c, found, unit - found.item_base, share.begin(cta + 1) - unit);
}

}  // namespace flashq::cuda
