// Who computes what in split-KV attention: planned on the device, from the lengths, without the host.
//
// The keys that a sequence sees are cut into units. Units are numbered over (sequence, KV head, block of rows, unit),
// and every worker takes an equal, contiguous range of the numbers, so it shares at most two items, its first and its
// last, with other workers: an item is a (sequence, KV head, block of rows). A worker is whatever goes through its
// range alone: a CTA, or some of its warps. Nothing here knows how keys are stored.
#pragma once
#include "cuda/sequences.cuh"

namespace flashq::cuda {

// Numbers of tokens, rows and units are 32-bit here: fits_plan() says which calls they are enough for.
struct SplitConfig {
  int32_t capacity;     // tokens that a sequence has room for
  Divisor unit;         // tokens of a unit; units start at its multiples
  Divisor group;        // query heads of a KV head
  Divisor block_rows;   // rows of an item at most: a row is a query token of one head of the group
  int32_t workers;      // that divide the units
  int32_t least_units;  // of a worker
  int32_t item_units;   // what the start of an item costs, in units: so many numbers before its own; 0 if unit_is_split
  bool unit_is_split;   // each unit is a partial result of its own (kv_chunk), not each worker's share of an item

  FLASHQ_HD int group_size() const { return static_cast<int>(group.value); }
};

inline constexpr int kMostItemUnits = 8;  // of SplitConfig::item_units

inline bool fits_plan(const AttentionParams& p, int64_t capacity, int64_t least_unit, int64_t least_rows) {
  constexpr double kMost = 0x1p31 - 0x1p12;
  const QueryView& q = p.query;
  const auto tokens = static_cast<double>(capacity), batch = static_cast<double>(q.batch);
  const double rows = static_cast<double>(q.total_tokens) * static_cast<double>(q.q_heads);
  const double items = batch * static_cast<double>(q.kv_heads) + rows / static_cast<double>(least_rows);
  return tokens <= kMost && rows <= kMost && batch <= kMost &&
         items * (tokens / static_cast<double>(least_unit) + 1 + kMostItemUnits) <= kMost;
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

// The keys of a sequence: [start, end).
struct SequenceKeys {
  int start, end;

  __device__ __forceinline__ bool operator==(const SequenceKeys& other) const {
    return start == other.start && end == other.end;
  }
};

// read(view, b) reads an element of an index tensor.
template <class Read> __device__ __forceinline__ SequenceKeys read_keys(const AttentionParams& p, const SplitConfig& c,
                                                                        int b, Read read) {
  SequenceKeys keys{.start = 0, .end = static_cast<int>(clamp(read(p.seqlens, b), 0, c.capacity))};
  if (p.kv_start.given()) keys.start = static_cast<int>(clamp(read(p.kv_start, b), 0, keys.end));
  return keys;
}

// Query tokens [q_begin, q_end) of sequence b, or none where b is past the last one. keys_of(b): its SequenceKeys.
template <class KeysOf>
__device__ __forceinline__ PlannedSequence plan_sequence(const AttentionParams& p, const SplitConfig& c, int b,
                                                         int q_begin, int q_end, KeysOf keys_of) {
  PlannedSequence s{.batch = b, .q_begin = q_begin, .q_len = q_end - q_begin};
  if (b >= p.query.batch || s.q_len <= 0) return s;
  const SequenceKeys keys = keys_of(b);
  s.kv_len = keys.end;
  s.kv_start = keys.start;
  const KeyRange seen = s.mask(p.score).visible(0, s.q_len - 1);
  if (seen.empty()) return s;
  s.first_unit = c.unit.quotient(static_cast<int>(seen.begin));
  s.units = c.unit.quotient(static_cast<int>(seen.end - 1)) + 1 - s.first_unit;
  s.row_blocks = c.block_rows.quotient(s.q_len * c.group_size() + static_cast<int>(c.block_rows.value) - 1);
  return s;
}

__device__ __forceinline__ PlannedSequence plan_sequence(const AttentionParams& p, const SplitConfig& c, int b,
                                                         int q_begin, int q_end) {
  return plan_sequence(p, c, b, q_begin, q_end,
                       [&](int b) { return read_keys(p, c, b, [](const IndexView& view, int i) { return view(i); }); });
}

// Goes through the sequences, 32 at a time; all lanes of a warp take part.
struct SequenceScan {
  int before = 0;  // query tokens of earlier sequences, where they are packed

  // Sequence base + lane.
  __device__ __forceinline__ PlannedSequence read(const AttentionParams& p, const SplitConfig& c, int base) {
    const QueryView& q = p.query;
    const int lane = static_cast<int>(threadIdx.x) % 32, b = base + lane;
    int begin = 0, end = static_cast<int>(q.q_len);
    if (q.cu_seqlens_q.given()) {
      end = b < q.batch ? static_cast<int>(clamp(q.cu_seqlens_q(b + 1), before, q.total_tokens)) : before;
      end = scan_warp(end, [](int x, int y) { return max_of(x, y); });
      begin = __shfl_up_sync(~0u, end, 1);
      if (lane == 0) begin = before;
      before = __shfl_sync(~0u, end, 31);
    }
    return plan_sequence(p, c, b, begin, end);
  }
  // Where the tokens of the last one end.
  __device__ __forceinline__ int end(const AttentionParams& p) const {
    return static_cast<int>(p.query.cu_seqlens_q.given() ? before : p.query.total_tokens);
  }
};

// Units [lo, hi) of one item: what a worker computes before it writes a result.
struct Segment {
  PlannedSequence sequence;
  int item;       // of the sequence: KV head * row blocks + row block
  int item_base;  // the item's first number in the plan
  int lo, hi;     // units, counted from the item's first
  int left;       // numbers of the worker behind this segment

  __device__ __forceinline__ bool given() const { return hi > 0; }
  __device__ __forceinline__ bool whole() const { return lo == 0 && hi == sequence.units; }
};

// How numbers are divided: the first `rest` workers have each + 1 of them, the others `each`.
struct Shares {
  int workers, each, rest;

  __device__ __forceinline__ Shares(int total, int workers)
      : workers(workers), each(divide_down(total, workers)), rest(total - each * workers) {}
  __device__ __forceinline__ Shares(const SplitConfig& c, int total)
      : Shares(total, max_of(min_of(divide_down(total, c.least_units), c.workers), 1)) {}

  // A worker's first number, and the worker that has a number.
  __device__ __forceinline__ int begin(int worker) const { return each * worker + min_of(worker, rest); }
  __device__ __forceinline__ int owner(int number) const {
    const int longer = rest * (each + 1);
    return number < longer ? divide_down(number, each + 1) : rest + divide_down(number - longer, each);
  }
};

// Of `count` numbers from the item's number `at` on, those of the item.
__device__ __forceinline__ Segment cut_segment(const SplitConfig& c, Segment s, int at, int count) {
  const int end = c.unit_is_split ? at + 1 : min_of(at + count, c.item_units + s.sequence.units);
  s.lo = max_of(at - c.item_units, 0);
  s.hi = max_of(end - c.item_units, 0);
  s.left = at + count - end;
  return s;
}

// The one behind it, or one that is not given().
__device__ __forceinline__ Segment next_segment(const AttentionParams& p, const SplitConfig& c, Segment s) {
  if (s.left <= 0) return {};
  if (s.hi < s.sequence.units) return cut_segment(c, s, s.hi, s.left);
  s.item_base += c.item_units + s.sequence.units;
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

// What this lane's sequence, or that of another lane, adds to the numbers.
__device__ __forceinline__ int count_numbers(const AttentionParams& p, const SplitConfig& c, const PlannedSequence& s) {
  return s.units == 0 ? 0 : (c.item_units + s.units) * s.items(p.query);
}
__device__ __forceinline__ PlannedSequence sequence_of(const PlannedSequence& mine, int lane) {
  const auto from = [lane](int x) { return __shfl_sync(~0u, x, lane); };
  return {from(mine.batch),    from(mine.q_begin),    from(mine.q_len), from(mine.kv_len),
          from(mine.kv_start), from(mine.first_unit), from(mine.units), from(mine.row_blocks)};
}

// The first segment of a worker, called by its warps; it is not given() if there is none. On the way, tokens that see
// nothing get their results: fill(batch, token, padding) is called by a whole warp, for its share of them.
template <class Fill> __device__ __forceinline__ Segment plan_worker(const AttentionParams& p, const SplitConfig& c,
                                                                     int worker, Fill fill) {
  const int warps = static_cast<int>(blockDim.x) / 32, grid_warps = static_cast<int>(gridDim.x) * warps;
  const int warp = static_cast<int>(blockIdx.x) * warps + static_cast<int>(threadIdx.x) / 32;
  const auto batch = static_cast<int>(p.query.batch);
  const auto sum = [](int x, int y) { return x + y; };
  PlannedSequence mine{};
  int total = 0, upto = 0, begin = 0, end = 0;  // upto: numbers of the sequences up to this lane's
#pragma unroll 1
  for (bool locating = false;; locating = true) {  // once to count, once to find where this worker starts
    SequenceScan scan;
    int base = 0;
    for (; base < batch; base += 32) {
      if (!locating || batch > 32) {
        mine = scan.read(p, c, base);
        upto = scan_warp(count_numbers(p, c, mine), sum) + (base == 0 ? 0 : __shfl_sync(~0u, upto, 31));
      }
      if (locating) {
        if (__any_sync(~0u, upto > begin)) break;
        continue;
      }
#pragma unroll 1
      for (unsigned blind = __ballot_sync(~0u, mine.batch < batch && mine.units == 0 && mine.q_len > 0); blind;
           blind &= blind - 1) {
        const PlannedSequence s = sequence_of(mine, __ffs(static_cast<int>(blind)) - 1);
        const int turn = s.batch % grid_warps;
#pragma unroll 1
        for (int i = warp >= turn ? warp - turn : warp - turn + grid_warps; i < s.q_len; i += grid_warps)
          fill(s.batch, s.q_begin + i, false);
      }
    }
    if (locating) break;
#pragma unroll 1
    for (int t = scan.end(p) + warp; t < p.query.total_tokens; t += grid_warps) fill(0, t, true);
    total = __shfl_sync(~0u, upto, 31);
    const Shares shares(c, total);
    if (total == 0 || worker >= shares.workers) return {};
    begin = shares.begin(worker);
    end = shares.begin(worker + 1);
  }
  const int lane = __ffs(static_cast<int>(__ballot_sync(~0u, upto > begin))) - 1;
  Segment found{.sequence = sequence_of(mine, lane)};
  const int first = __shfl_sync(~0u, upto - count_numbers(p, c, mine), lane);
  const int numbers = c.item_units + found.sequence.units;
  found.item = divide_down(begin - first, numbers);
  found.item_base = first + found.item * numbers;
  return cut_segment(c, found, begin - found.item_base, end - begin);
}

// Item `number` of the plan, whole, called by whole warps; not given() if there are fewer. `total`: all numbers.
__device__ __forceinline__ Segment plan_item(const AttentionParams& p, const SplitConfig& c, int number, int& total) {
  Segment found{};
  SequenceScan scan;
  int base = 0, items = 0;
#pragma unroll 1
  for (int b = 0; b < p.query.batch; b += 32) {
    const PlannedSequence mine = scan.read(p, c, b);
    const auto sum = [](int x, int y) { return x + y; };
    const int own = count_numbers(p, c, mine), own_items = mine.units == 0 ? 0 : mine.items(p.query);
    const int upto = base + scan_warp(own, sum), items_upto = items + scan_warp(own_items, sum);
    const unsigned chosen = __ballot_sync(~0u, items_upto > number && items_upto - own_items <= number);
    if (chosen) {
      const int lane = __ffs(static_cast<int>(chosen)) - 1;
      found.sequence = sequence_of(mine, lane);
      found.item = number - __shfl_sync(~0u, items_upto - own_items, lane);
      found.item_base = __shfl_sync(~0u, upto - own, lane) + found.item * (c.item_units + found.sequence.units);
      found.hi = found.sequence.units;
    }
    base = __shfl_sync(~0u, upto, 31);
    items = __shfl_sync(~0u, items_upto, 31);
  }
  total = base;
  return found;
}

// What the rows of a segment's item are, and which keys they see within the segment.
struct ItemRows {
  int kv_head, first_row, first_query, last_query, rows;
  int begin, end;  // the keys; none: both 0

  __device__ __forceinline__ ItemRows(const AttentionParams& p, const SplitConfig& c, const Segment& s) {
    const PlannedSequence& sequence = s.sequence;
    const int block_rows = static_cast<int>(c.block_rows.value);
    kv_head = s.item;
    if (sequence.row_blocks > 1) kv_head = divide_down(s.item, sequence.row_blocks);
    first_row = (s.item - kv_head * sequence.row_blocks) * block_rows;
    rows = min_of(block_rows, sequence.q_len * c.group_size() - first_row);
    first_query = c.group.quotient(first_row);
    last_query = c.group.quotient(first_row + rows - 1);
    const int64_t first_unit = sequence.first_unit + s.lo, end_unit = sequence.first_unit + s.hi;
    const KeyRange seen = intersect(sequence.mask(p.score).visible(first_query, last_query),
                                    {first_unit * c.unit.value, end_unit * c.unit.value});
    begin = seen.empty() ? 0 : static_cast<int>(seen.begin);
    end = seen.empty() ? 0 : static_cast<int>(seen.end);
  }
};

}  // namespace flashq::cuda
