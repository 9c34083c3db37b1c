// The plan of up to kSequences unpacked sequences in shared memory: built once by a CTA, it finds the item of a number
// without a scan of the lengths, and sees whether items are alike.
#pragma once
#include "cuda/decode/partial_list.cuh"
#include "cuda/decode/plan.cuh"

namespace flashq::cuda {

// How the plan is divided among workers. Items that are equally long, but for 1 / 32, are not cut at equal numbers,
// which would leave most workers with parts of two: each gets as many workers, or each worker as many of them.
struct Division {
  int total;         // numbers
  int items;         // of all sequences
  int item_workers;  // of each item, or
  int worker_items;  // of each worker; both 0: equal ranges of the numbers
  int merged;        // so many neighbouring workers of an item are a CTA's, which merges their results; 0: each alone

  // Whether no item is left for the second kernel.
  __device__ __forceinline__ bool complete() const {
    return worker_items > 0 || (item_workers > 0 && item_workers == merged);
  }
};

// When items that are alike are divided evenly, and when CTAs merge what their workers have of an item.
struct AlikeRule {
  int32_t least_workers;  // that take part,
  int32_t least_merging;  // where CTAs merge
  int32_t cta_workers;    // workers of a CTA, a power of 2
  bool merges_first;      // also where more workers could take part alone
};

class PlanTable {
 public:
  static constexpr int kSequences = 256, kKvHeads = 1024, kMaxWarps = 8;

  static FLASHQ_HD bool holds(const AttentionParams& p) {
    return !p.query.cu_seqlens_q.given() && p.query.batch <= kSequences && p.query.kv_heads <= kKvHeads;
  }

  // Called by all threads of a CTA. It may be called while the kernel before this one still writes the lengths:
  // outdated() tells.
  __device__ __forceinline__ Division build(const AttentionParams& p, const SplitConfig& c, const AlikeRule& rule) {
    const auto batch = static_cast<int>(p.query.batch), q_len = static_cast<int>(p.query.q_len);
    const auto thread = static_cast<int>(threadIdx.x), threads = static_cast<int>(blockDim.x);
    int total = 0, seen = 0, longest = 0;
#pragma unroll 1
    for (int base = 0; base < batch; base += threads) {
      const int b = base + thread;
      if (b < batch) keys_[b] = keys_now(p, c, b);
      const PlannedSequence s = plan_sequence(p, c, b, 0, q_len, [&](int b) { return keys_[b]; });
      const int upto = scan_warp(count_numbers(p, c, s), [](int x, int y) { return x + y; });
      const unsigned sees = __ballot_sync(~0u, s.units > 0);
      const int most = __reduce_max_sync(~0u, s.units);
      if (thread % 32 == 31) warps_[thread / 32] = {upto, __popc(sees), most};
      __syncthreads();
      int before = total;
#pragma unroll 1
      for (int w = 0; w < threads / 32; ++w) {
        if (w < thread / 32) before += warps_[w].numbers;
        total += warps_[w].numbers;
        seen += warps_[w].seen;
        longest = max_of(longest, warps_[w].longest);
      }
      if (b < batch) upto_[b] = before + upto;
      __syncthreads();
    }
    Division d{.total = total, .items = seen * items_of_sequence(p, c)};
    if (seen < batch || (c.item_units + longest) * d.items - total > total / 32) return d;
    const int each = divide_down(c.workers, d.items), items = divide_down(d.items + c.workers - 1, c.workers);
    if (each > 0 && longest >= each * c.least_units) {
      // Several items for a CTA, or several CTAs for an item.
      const int merging = each < rule.cta_workers ? each : each & -rule.cta_workers;
      const bool merges = (merging & (merging - 1)) == 0 || each >= rule.cta_workers;
      const bool alone = each * d.items >= rule.least_workers;
      if (merges && merging * d.items >= rule.least_merging && (merging == each || rule.merges_first || !alone)) {
        d.item_workers = merging;
        d.merged = min_of(merging, rule.cta_workers);
      } else if (alone) {
        d.item_workers = each;
      }
    }
    if (each == 0 && divide_down(d.items, items) >= rule.least_workers) d.worker_items = items;
    return d;
  }

  // Whether lengths are others now than those of the plan. Called by all threads of the CTA.
  __device__ __forceinline__ bool outdated(const AttentionParams& p, const SplitConfig& c) const {
    bool others = false;
    for (int b = static_cast<int>(threadIdx.x); b < p.query.batch; b += static_cast<int>(blockDim.x))
      others |= !(keys_now(p, c, b) == keys_[b]);
    return __syncthreads_or(others);
  }

  // Whether a sequence has no key that its query tokens see.
  __device__ __forceinline__ bool blind(int b) const { return upto_[b] == number_of(b); }

  // The first segment of a worker, by a whole warp; not given() if there is none. Where CTAs merge, the workers of each
  // are numbered one after the other.
  __device__ __forceinline__ Segment find(const AttentionParams& p, const SplitConfig& c, const Division& d,
                                          int worker) const {
    if (d.total == 0) return {};
    if (d.item_workers > 0) {
      const int number = divide_down(worker, d.item_workers), share = worker - number * d.item_workers;
      if (number >= d.items) return {};
      Segment s = item(p, c, number);
      const int used = min_of(s.sequence.units, d.item_workers);
      if (share >= used) return {};
      const Shares even(s.sequence.units, used);
      s.lo = even.begin(share);
      s.hi = even.begin(share + 1);
      return s;
    }
    if (d.worker_items > 0) {
      const int number = worker * d.worker_items;
      if (number >= d.items) return {};
      Segment s = item(p, c, number);
      const int end = min_of(number + d.worker_items, d.items);
      s.left = (end == d.items ? d.total : item(p, c, end).item_base) - s.item_base - c.item_units - s.sequence.units;
      return s;
    }
    const Shares shares(c, d.total);
    if (worker >= shares.workers) return {};
    const int begin = shares.begin(worker), count = shares.begin(worker + 1) - begin;
    const auto batch = static_cast<int>(p.query.batch), lane = static_cast<int>(threadIdx.x) % 32;
    const auto first_behind = [&](int base, int stride) {  // of 32 strides from sequence `base` on: its number
      const int last = min_of(base + (lane + 1) * stride, batch) - 1;
      return __ffs(static_cast<int>(__ballot_sync(~0u, upto_[last] > begin))) - 1;
    };
    int b = 0;
    if (batch > 32) b = first_behind(0, kSequences / 32) * (kSequences / 32);
    b += first_behind(b, 1);
    Segment found{.sequence = sequence(p, c, b)};
    const int first = number_of(b), numbers = c.item_units + found.sequence.units;
    found.item = divide_down(begin - first, numbers);
    found.item_base = first + found.item * numbers;
    return cut_segment(c, found, begin - found.item_base, count);
  }

  // Item `number` of all sequences, those that see no key included, whole; not given() if it sees no key.
  __device__ __forceinline__ Segment item(const AttentionParams& p, const SplitConfig& c, int number) const {
    const int each = items_of_sequence(p, c), b = divide_down(number, each);
    Segment found{.sequence = sequence(p, c, b), .item = number - b * each};
    found.item_base = number_of(b) + found.item * (c.item_units + found.sequence.units);
    found.hi = found.sequence.units;
    return found;
  }

  // Where the partial results of an item lie.
  static __device__ __forceinline__ PartialList find_partials(const SplitConfig& c, const Division& d,
                                                              const Segment& segment, int number) {
    if (d.worker_items > 0) return {.count = 1};
    if (d.item_workers == 0) return cuda::find_partials(c, segment, d.total);
    const int worker = number * d.item_workers, used = min_of(segment.sequence.units, d.item_workers);
    const int merged = max_of(d.merged, 1), step = 2 * merged;
    return {2 * worker, 2 * worker + step, step, divide_down(used + merged - 1, merged)};
  }

 private:
  struct OfWarp { int numbers, seen, longest; };

  static __device__ __forceinline__ int items_of_sequence(const AttentionParams& p, const SplitConfig& c) {
    const int rows = static_cast<int>(p.query.q_len) * c.group_size(),
              block_rows = static_cast<int>(c.block_rows.value);
    return c.block_rows.quotient(rows + block_rows - 1) * static_cast<int>(p.query.kv_heads);
  }
  // Past the L1, which may hold what was there before the kernel before this one.
  static __device__ __forceinline__ SequenceKeys keys_now(const AttentionParams& p, const SplitConfig& c, int b) {
    return read_keys(p, c, b, [](const IndexView& view, int i) { return load_past_l1(view, i); });
  }
  __device__ __forceinline__ PlannedSequence sequence(const AttentionParams& p, const SplitConfig& c, int b) const {
    return plan_sequence(p, c, b, 0, static_cast<int>(p.query.q_len), [&](int b) { return keys_[b]; });
  }
  __device__ __forceinline__ int number_of(int b) const { return b == 0 ? 0 : upto_[b - 1]; }

  int upto_[kSequences];  // numbers of the sequences up to each
  SequenceKeys keys_[kSequences];
  OfWarp warps_[kMaxWarps];
};

}  // namespace flashq::cuda
