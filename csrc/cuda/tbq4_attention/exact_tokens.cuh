// Keys that are read from the exact pool, in 16 bit: a few at the start of a sequence and the most recent ones. The
// merge adds them to each row, in fp32: there are too few of them for anything else to pay.
#pragma once
#include "cuda/decode/merge_rows.cuh"
#include "cuda/decode/row_results.cuh"
#include "cuda/ptx/cp_async.cuh"
#include "cuda/tbq4_attention/exact_rule.cuh"
#include "cuda/tbq4_attention/offsets.cuh"
#include "cuda/tbq4_attention/scores.cuh"

namespace flashq::cuda {

inline constexpr int kExactBatch = 256;  // tokens whose scores are kept

// The exact tokens of one row, counted from 0: leading ones, then recent ones.
struct ExactTokens {
  int first, lead, recent;  // where each kind starts, and how many lead
  int count;

  __device__ __forceinline__ ExactTokens(const CodeParams& p, const Segment& segment, int query) {
    const ExactRule rule{p.call.kv.exact_first, p.call.kv.exact_last};
    const Mask mask = segment.sequence.mask(p.call.score);
    const KeyRange keys = mask.visible(query);
    const auto seen = [&](int64_t key) {
      return static_cast<int>(clamp(key, keys.begin, max_of(keys.begin, keys.end)));
    };
    first = seen(keys.begin);
    const int lead_end = seen(rule.leading(mask).end), end = seen(keys.end);
    lead = lead_end - first;
    recent = max_of(seen(rule.recent(mask, query).begin), lead_end);
    count = lead + end - recent;
  }
  __device__ __forceinline__ int token(int i) const { return i < lead ? first + i : recent + i - lead; }
};

// The pages of tokens [begin, begin + kExactBatch), -1 for those that the pool does not have. All threads of the block
// call it.
__device__ __forceinline__ void find_exact(const CodeParams& p, int sequence, const ExactTokens& tokens, int begin,
                                           int (&pages)[kExactBatch]) {
  const int batch = min_of(tokens.count - begin, kExactBatch);
  for (int i = static_cast<int>(threadIdx.x); i < batch; i += static_cast<int>(blockDim.x))
    pages[i] = static_cast<int>(exact_page(p, sequence, tokens.token(begin + i)));
}
// Offset of a token's key or value in its page of the pool.
__device__ __forceinline__ int64_t exact_offset(const CodeParams& p, int64_t page, int kv_head, int token,
                                                const int64_t (&stride)[3]) {
  const int slot = token - p.exact_page_size.quotient(token) * static_cast<int>(p.exact_page_size.value);
  return page * stride[0] + slot * stride[1] + kv_head * stride[2];
}

// 16 values of a lane's part of a row, in fp32.
template <class T> __device__ __forceinline__ void load_sixteen(const uint16_t* from, bool there, bool wide,
                                                                float (&x)[16]) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const auto eight = load_eight(from + 8 * i, there, wide);
#pragma unroll
    for (int j = 0; j < 8; ++j) x[8 * i + j] = T::load(static_cast<uint16_t>(eight.value[j / 2] >> (j % 2 * 16)));
  }
}

// Scores of tokens [begin, begin + kExactBatch) of a row, -inf for those that the pool does not have. D / 16
// neighbouring lanes work on a token; all threads of the block call it.
template <class T, int D>
__device__ __forceinline__ void score_exact(const CodeParams& p, const Segment& segment, const ItemRows& item, int row,
                                            const ExactTokens& tokens, int begin, const int (&pages)[kExactBatch],
                                            float (&scores)[kExactBatch]) {
  constexpr int kLanes = D / 16;
  const int lane = static_cast<int>(threadIdx.x) % kLanes, d = lane * 16;
  const int side = static_cast<int>(blockDim.x) / kLanes, batch = min_of(tokens.count - begin, kExactBatch);
  const KvView& pool = p.call.kv.exact;
  float q[16];
  load_sixteen<T>(static_cast<const uint16_t*>(p.call.query.q) +
                      query_offset(p.call.query, p.split.group, segment, item, row) + d,
                  true, p.wide_q, q);
#pragma unroll 3
  for (int base = 0; base < batch; base += side) {
    const int i = base + static_cast<int>(threadIdx.x) / kLanes;
    const int page = i < batch ? pages[i] : -1, token = tokens.token(begin + i);
    const int64_t at = exact_offset(p, max_of(page, 0), item.kv_head, token, pool.k_stride) + d;
    float k[16], sum = 0;
    load_sixteen<T>(static_cast<const uint16_t*>(pool.k) + at, page >= 0, p.wide_exact, k);
    if (page >= 0)
      ptx::prefetch_l2(static_cast<const uint16_t*>(pool.v) +
                       exact_offset(p, page, item.kv_head, token, pool.v_stride) + d);
#pragma unroll
    for (int j = 0; j < 16; ++j) sum = fmaf(q[j], k[j], sum);
#pragma unroll
    for (int step = 1; step < kLanes; step *= 2) sum += __shfl_xor_sync(~0u, sum, step);
    if (lane == 0 && i < batch) scores[i] = page < 0 ? -kInf : finish_score(p.rule, sum * p.rule.factor);
  }
}

// What every `groups`-th of these tokens, from `group` on, gives four columns from d on.
template <class T>
__device__ __forceinline__ RowPart weigh_exact(const CodeParams& p, const ItemRows& item, const ExactTokens& tokens,
                                               int begin, int group, int groups, int d, const int (&pages)[kExactBatch],
                                               const float (&scores)[kExactBatch]) {
  const int batch = min_of(tokens.count - begin, kExactBatch);
  const KvView& pool = p.call.kv.exact;
  RowPart part;
  bool any = false;
#pragma unroll 4
  for (int i = group; i < batch; i += groups) part.state.max = fmaxf(part.state.max, scores[i]);
  if (part.state.max == -kInf) part.state.max = kLeastMaximum;
#pragma unroll 5
  for (int i = group; i < batch; i += groups) {
    if (pages[i] < 0) continue;
    any = true;
    const auto* from = static_cast<const uint16_t*>(pool.v) + d +
                       exact_offset(p, pages[i], item.kv_head, tokens.token(begin + i), pool.v_stride);
    Vector<uint32_t, 2> v;
    if (p.wide_exact)
      v = load<Vector<uint32_t, 2>>(from);
    else
      v = {from[0] | uint32_t{from[1]} << 16, from[2] | uint32_t{from[3]} << 16};
    const float weight = exp2f(scores[i] - part.state.max);
    const auto value = [&](int j) { return T::load(static_cast<uint16_t>(v.value[j / 2] >> (j % 2 * 16))); };
    part.state.sum += weight;
    part.o = {fmaf(weight, value(0), part.o.x), fmaf(weight, value(1), part.o.y), fmaf(weight, value(2), part.o.z),
              fmaf(weight, value(3), part.o.w)};
  }
  return any ? part : RowPart{};
}

}  // namespace flashq::cuda
