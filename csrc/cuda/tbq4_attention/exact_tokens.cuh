// Keys that are read from the exact pool, in 16 bit: a few at the start of a sequence and the most recent ones.
//
// Some blocks of the kernel compute nothing else, so that this is done while the others stream codes. A warp takes 8
// rows of an item and query token; products are of what memory holds, not rotated. Keys are the left operand, as codes
// are, and so are the weights of the product with values: in two 16-bit parts, which are rows g and g + 8 of the same
// operand. Partial results have slots of their own behind those of codes (slots.cuh).
#pragma once
#include <cfloat>

#include "cuda/ptx/cp_async.cuh"
#include "cuda/tbq4_attention/exact_rule.cuh"
#include "cuda/tbq4_attention/offsets.cuh"
#include "cuda/tbq4_attention/scores.cuh"
#include "cuda/tbq4_attention/slots.cuh"

namespace flashq::cuda {

// The maximum of a row that has seen keys, but none whose score is more than -inf.
inline constexpr float kLeastExactMaximum = -FLT_MAX;

template <class T, int D> class ExactRows {
  static constexpr int kWidth = CodeTile<D>::kWidth, kBlocks = CodeTile<D>::kBlocks;
  static constexpr int kWords = kWidth / 8;  // of 2 values of a key, that a lane reads of a block
  static constexpr int kSpans = D / 64;      // of values: a lane reads 8 of each, and 16 results of a row are its own
  static constexpr int kGroup = 16;          // tokens at a time

 public:
  // Rows of an item, 8 at most from first_row on, of one query token: they read the same tokens. A row's bits depend on
  // those alone: groups start at multiples of 16 tokens.
  __device__ __forceinline__ ExactRows(const CodeParams& p, const Segment& segment, const ItemRows& item, int first_row,
                                       int end_row)
      : p_(p), segment_(segment), item_(item), first_row_(first_row), end_row_(end_row) {
    const ExactRule rule{p.call.kv.exact_first, p.call.kv.exact_last};
    const Mask mask = segment.sequence.mask(p.call.score);
    const int query = p.split.group.quotient(item.first_row + first_row);
    const KeyRange seen = mask.visible(query);
    const auto in_seen = [&](int64_t key) {
      return static_cast<int>(clamp(key, seen.begin, max_of(seen.begin, seen.end)));
    };
    begin_ = in_seen(seen.begin);
    end_ = in_seen(seen.end);
    lead_end_ = in_seen(rule.leading(mask).end);
    recent_begin_ = max_of(in_seen(rule.recent(mask, query).begin), lead_end_);
  }

  // Every `parts`-th group of tokens, from that with number `part` on; the results go to `slot`.
  __device__ __forceinline__ void attend(int part, int parts, int slot) const {
    const int lane = ptx::fresh_lane(), g = lane / 4;
    uint32_t q[kBlocks][kWords];
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) load_query<D>(p_, segment_, item_, first_row_ + g, b, q[b]);
    float acc[kSpans * 8][4] = {};
    float max[2] = {-kInf, -kInf}, sum[2] = {};
    int group = next_group(begin_ / kGroup, part, parts);
    Place place = find(group);
    int after = next_group(group + 1, part, parts);
#pragma unroll 1
    while (group * kGroup < end_) {
      // Pages are looked up a group ahead, and rows are on their way into the L2 cache while the last ones are used.
      const Place next = find(after);
      if (const uint32_t there = __ballot_sync(~0u, place.there) & 0xffff; there != 0) {
        // In place of a token that is not there one that is: the loads need no branch, and its weight is 0.
        const int from = place.there ? lane : __ffs(static_cast<int>(there)) - 1;
        place.k = __shfl_sync(~0u, place.k, from);
        place.v = __shfl_sync(~0u, place.v, from);
        float s[2][4] = {};
        multiply_keys(place, q, s);
        uint32_t high[2], low[2];
        weigh(there, s, max, sum, acc, high, low);
        add_values(place, high, low, acc);
      }
      place = next;
      prefetch(place);
      group = after;
      after = next_group(group + 1, part, parts);
    }
    write(slot, max, sum, acc);
  }

 private:
  // Where a token of a group is: that with the number lane % 16.
  struct Place {
    int64_t k, v;
    bool there;
  };

  // The first group from `group` on that has to be looked at.
  __device__ __forceinline__ int next_group(int group, int part, int parts) const {
    const int lead_groups = lead_end_ > begin_ ? (lead_end_ + kGroup - 1) / kGroup : 0;
    while (true) {
      if (group >= lead_groups) group = max_of(group, recent_begin_ / kGroup);
      if ((group & (parts - 1)) == part || group * kGroup >= end_) return group;
      ++group;
    }
  }
  __device__ __forceinline__ Place find(int group) const {
    const KvView& pool = p_.call.kv.exact;
    const int token = group * kGroup + ptx::fresh_lane() % kGroup;
    Place place{};
    if (token < begin_ || token >= end_ || (token >= lead_end_ && token < recent_begin_)) return place;
    const int64_t page = exact_page(p_, segment_.sequence.batch, token);
    if (page < 0) return place;
    const int slot = token - p_.exact_page_size.quotient(token) * static_cast<int>(p_.exact_page_size.value);
    place.k = page * pool.k_stride[0] + slot * pool.k_stride[1] + item_.kv_head * pool.k_stride[2];
    place.v = page * pool.v_stride[0] + slot * pool.v_stride[1] + item_.kv_head * pool.v_stride[2];
    place.there = true;
    return place;
  }
  __device__ __forceinline__ void prefetch(const Place& place) const {
    if (!place.there) return;
#pragma unroll
    for (int d = ptx::fresh_lane() / kGroup * 64; d < D; d += 128) {
      ptx::prefetch_l2(static_cast<const uint16_t*>(p_.call.kv.exact.k) + place.k + d);
      ptx::prefetch_l2(static_cast<const uint16_t*>(p_.call.kv.exact.v) + place.v + d);
    }
  }

  // s[0] + s[1]: products of tokens g + 8 h and rows 2 t + c, in [2 h + c].
  __device__ __forceinline__ void multiply_keys(const Place& place, const uint32_t (&q)[kBlocks][kWords],
                                                float (&s)[2][4]) const {
    const int lane = ptx::fresh_lane(), g = lane / 4, t = lane % 4;
    const uint16_t* row[2];
#pragma unroll
    for (int h = 0; h < 2; ++h)
      row[h] =
          static_cast<const uint16_t*>(p_.call.kv.exact.k) + __shfl_sync(~0u, place.k, g + 8 * h) + t * (kWidth / 4);
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) {
      const uint16_t* from[kWords / 2];
      Vector<uint32_t, 4> x[kWords / 2];
#pragma unroll
      for (int i = 0; i < kWords / 2; ++i) from[i] = row[i % 2] + b * kWidth + i / 2 * 8;
      load_eights(from, p_.wide_exact, x);
#pragma unroll
      for (int k = 0; k < kWords / 2; ++k) {
        const Vector<uint32_t, 4>&x0 = x[k / 2 * 2], &x1 = x[k / 2 * 2 + 1];
        const int w = k % 2 * 2;
        const uint32_t a[4] = {x0.value[w], x1.value[w], x0.value[w + 1], x1.value[w + 1]};
        ptx::mma_16x8x16<T>(s[k % 2], a, q[b][2 * k], q[b][2 * k + 1]);
      }
    }
  }

  // Scores to weights in two parts: lane (g, t) has those of row g, tokens 2 t, 2 t + 1 in [0] and 8 later ones in [1].
  __device__ __forceinline__ void weigh(uint32_t there, const float (&s)[2][4], float (&max)[2], float (&sum)[2],
                                        float (&acc)[kSpans * 8][4], uint32_t (&high)[2], uint32_t (&low)[2]) const {
    const int g = ptx::fresh_lane() / 4;
    float x[4], shrink[2];
    bool shrinks = false;
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      float top = max[c];
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int i = 2 * h + c;
        x[i] = finish_score(p_.rule, (s[0][i] + s[1][i]) * p_.rule.factor);
        // May miss a NaN; the sum does not.
        if (there >> (g + 8 * h) & 1) top = fmaxf(top, fmaxf(x[i], kLeastExactMaximum));
      }
#pragma unroll
      for (int step = 4; step < 32; step *= 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, step));
      shrink[c] = top == max[c] ? 1 : ptx::exp2_approx(max[c] - top);
      shrinks |= shrink[c] != 1;
      max[c] = top;
      sum[c] *= shrink[c];
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        float& y = x[2 * h + c];
        y = there >> (g + 8 * h) & 1 ? ptx::exp2_approx(y - top) : 0;
        sum[c] += y;
      }
    }
    if (__any_sync(~0u, shrinks)) {
      const float even = __shfl_sync(~0u, shrink[0], g / 2), odd = __shfl_sync(~0u, shrink[1], g / 2);
      const float own = g % 2 ? odd : even;
#pragma unroll
      for (int i = 0; i < kSpans * 8 * 4; ++i) acc[i / 4][i % 4] *= own;
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const uint32_t top = ptx::pack<T>(x[2 * h], x[2 * h + 1]);
      const uint32_t rest = ptx::pack<T>(x[2 * h] - T::load(static_cast<uint16_t>(top)),
                                         x[2 * h + 1] - T::load(static_cast<uint16_t>(top >> 16)));
      high[h] = ptx::transpose_8x8(top);
      low[h] = ptx::transpose_8x8(rest);
    }
  }

  // Column g of the right operand n of a span is its value 8 g + n: what a lane has loaded of four tokens.
  __device__ __forceinline__ void add_values(const Place& place, const uint32_t (&high)[2], const uint32_t (&low)[2],
                                             float (&acc)[kSpans * 8][4]) const {
    const int lane = ptx::fresh_lane(), g = lane / 4, t = lane % 4;
    const uint32_t a[4] = {high[0], low[0], high[1], low[1]};
    const uint16_t* row[4];
#pragma unroll
    for (int k = 0; k < 4; ++k)
      row[k] = static_cast<const uint16_t*>(p_.call.kv.exact.v) + __shfl_sync(~0u, place.v, 2 * t + k % 2 + k / 2 * 8) +
               g * 8;
#pragma unroll
    for (int span = 0; span < kSpans; ++span) {
      const uint16_t* const from[4] = {row[0] + span * 64, row[1] + span * 64, row[2] + span * 64, row[3] + span * 64};
      Vector<uint32_t, 4> x[4];
      load_eights(from, p_.wide_exact, x);
#pragma unroll
      for (int n = 0; n < 8; ++n) {
        const uint32_t halves = n % 2 ? 0x7632 : 0x5410;
        ptx::mma_16x8x16<T>(acc[span * 8 + n], a, __byte_perm(x[0].value[n / 2], x[1].value[n / 2], halves),
                            __byte_perm(x[2].value[n / 2], x[3].value[n / 2], halves));
      }
    }
  }

  __device__ __forceinline__ void write(int slot, const float (&max)[2], float (&sum)[2],
                                        const float (&acc)[kSpans * 8][4]) const {
    const int lane = ptx::fresh_lane(), g = lane / 4, t = lane % 4;
#pragma unroll
    for (int c = 0; c < 2; ++c) {
#pragma unroll
      for (int step = 4; step < 32; step *= 2) sum[c] += __shfl_xor_sync(~0u, sum[c], step);
      const int row = first_row_ + 2 * t + c;
      if (g == 0 && row < end_row_) p_.partials.state(slot, row) = {max[c], sum[c]};
    }
    if (first_row_ + g >= end_row_) return;
    float* const to = p_.partials.row(slot, first_row_ + g) + t * 16;
#pragma unroll
    for (int i = 0; i < kSpans * 4; ++i) {  // four of 16 columns: of 8 from each of two accumulators
      const int span = i / 4, c = i / 2 % 2, n = span * 8 + i % 2 * 4;
      const auto value = [&](int k) { return acc[n + k][c] + acc[n + k][2 + c]; };
      *reinterpret_cast<float4*>(to + span * 64 + c * 8 + i % 2 * 4) = float4{value(0), value(1), value(2), value(3)};
    }
  }

  const CodeParams& p_;
  const Segment& segment_;
  const ItemRows& item_;
  int first_row_, end_row_;
  int begin_, end_, lead_end_, recent_begin_;  // of keys that the rows see, leading and recent ones
};

// Exact tokens of all items, by the CTAs behind those that stream codes. A task is eight rows of one query token of an
// item, or what there is of them, and a part of its tokens; each warp has every so many of them.
template <int D> __device__ __noinline__ void attend_exact(const CodeParams& p) {
  const int warps = static_cast<int>(blockDim.x) / 32, workers = (static_cast<int>(gridDim.x) - p.code_ctas) * warps;
  const int worker = (static_cast<int>(blockIdx.x) - p.code_ctas) * warps + static_cast<int>(threadIdx.x) / 32;
  const int parts = p.exact_parts, eights = p.exact_eights, of_item = p.exact_queries * eights * parts;
#pragma unroll 1
  for (int task = worker; task < p.exact_tasks; task += workers) {
    const int number = divide_down(task, of_item), rest = task - number * of_item;
    const int chunk = divide_down(rest, parts), part = rest - chunk * parts;
    const int query = divide_down(chunk, eights), eight = chunk - query * eights;
    int total = 0;
    const Segment segment = plan_item(p.call, p.split, number, total);
    if (!segment.given()) return;  // nor are those with larger numbers
    const ItemRows item(p.call, p.split, segment);
    const int begin = (item.first_query + query) * p.split.group_size() - item.first_row;
    const int first_row = max_of(begin, 0) + eight * 8;
    const int end_row = min_of(min_of(begin + p.split.group_size(), item.rows), first_row + 8);
    if (first_row >= end_row) continue;
    with_type(p.call.query.dtype, [&](auto type) {
      ExactRows<decltype(type), D>(p, segment, item, first_row, end_row)
          .attend(part, parts, slot_of_exact(p, number, part));
    });
  }
}

}  // namespace flashq::cuda
