// From a unit's accumulators to out and lse: partials of splits, their merge in split order, sinks, rows without keys.
#pragma once
#include "cpu/attention/softmax.h"
#include "cpu/plan.h"

namespace flashq::FLASHQ_ISA {
namespace {

using cpu::Plan;
using cpu::Sequence;
using cpu::Unit;

// Rows of a unit, [KV head][row]: `head_rows` rows lie between the first rows of two heads.
struct UnitRows {
  const float* acc;       // (heads, head_rows, plan.width): sum of exp2(score - max) * v
  const RowState* state;  // (heads, head_rows)
  int64_t head_rows;
};

// out = o * weight / sum: a weight of 1 rounds once.
template <class T> FLASHQ_SIMD void store_row(T* out, const float* o, float weight, float sum, int64_t dim) {
  for (int64_t d = 0; d < dim; d += kLanes) narrow_n(out + d, div(mul(load(o + d), set1(weight)), set1(sum)), dim - d);
}
FLASHQ_SIMD void store_row(void* out, Dtype dtype, const float* o, float weight, float sum, int64_t dim) {
  if (dtype == Dtype::kFloat32) store_row(static_cast<float*>(out), o, weight, sum, dim);
  if (dtype == Dtype::kFloat16) store_row(static_cast<Fp16*>(out), o, weight, sum, dim);
  if (dtype == Dtype::kBfloat16) store_row(static_cast<Bf16*>(out), o, weight, sum, dim);
}
// A row of `from` as it is: no arithmetic that could flush a subnormal or lose the sign of -0.
FLASHQ_SIMD void copy_row(void* out, Dtype out_dtype, const void* from, Dtype dtype, int64_t dim) {
  if (out_dtype == dtype) {
    std::memcpy(out, from, static_cast<size_t>(dim * size_of(dtype)));
    return;
  }
  auto* to = static_cast<float*>(out);  // the only other out_dtype
  for (int64_t d = 0; d < dim; d += kLanes) {
    const VecF x = dtype == Dtype::kFloat16 ? widen_n(static_cast<const Fp16*>(from) + d, dim - d)
                                            : widen_n(static_cast<const Bf16*>(from) + d, dim - d);
    narrow_n(to + d, x, dim - d);
  }
}
FLASHQ_SIMD char* out_row(const QueryView& q, const Sequence& s, int64_t query, int64_t q_head) {
  const int64_t at = s.batch * q.out_stride[0] + (s.q_begin + query) * q.out_stride[1] + q_head * q.out_stride[2];
  return static_cast<char*>(q.out) + at * size_of(q.out_dtype);
}

// Writes out and lse of row `row` from its state over all keys. `only_value(head, key)` is the value row of a key, in
// q's dtype, for rows that see one key; null if the values are not stored in q's dtype.
template <class OnlyValue>
[[gnu::noinline]] void finish_row(const AttentionParams& p, const Sequence& s, int64_t kv_head, int64_t row,
                                  int64_t group, SoftmaxState<Binary> state, const float* o,
                                  const OnlyValue& only_value) {
  const QueryView& q = p.query;
  const int64_t query = row / group, q_head = kv_head * group + row % group;
  char* out = out_row(q, s, query, q_head);
  float* lse = q.lse + s.batch * q.lse_stride[0] + q_head * q.lse_stride[1] + (s.q_begin + query) * q.lse_stride[2];
  const float sink = p.score.sinks && !s.padding ? p.score.sinks[q_head * p.score.sinks_stride] : -kInf;
  const bool has_sink = sink != -kInf;
  const KeyRange keys = s.mask.visible(query);
  if (keys.empty()) {  // whatever q holds
    std::memset(out, 0, static_cast<size_t>(q.head_dim * size_of(q.out_dtype)));
    *lse = sink;
    return;
  }
  float weight = 1;
  if (has_sink) weight = merge(state, {sink * kLog2E, 1}).a;
  // In double: the two terms may cancel. A row of nothing but -inf has the sum 0: lse -inf, and out 0/0.
  *lse = static_cast<float>(state.max * 0.69314718055994530942 + log(static_cast<double>(state.sum)));
  const void* value =
      keys.size() == 1 && !has_sink && __builtin_isfinite(*lse) ? only_value(kv_head, keys.begin) : nullptr;
  if (value)
    copy_row(out, q.out_dtype, value, q.dtype, q.head_dim);
  else
    store_row(out, q.out_dtype, o, weight, state.sum == 0 ? __builtin_nanf("") : state.sum, q.head_dim);
}

// a, o <- a, o merged with b, from, which is not empty.
FLASHQ_SIMD void merge_output(SoftmaxState<Binary>& a, const SoftmaxState<Binary>& b, float* o, const float* from,
                              int64_t width) {
  const bool alone = a.empty();
  const MergeWeights weight = merge(a, b);
  for (int64_t d = 0; d < width; d += kLanes) {
    const VecF x = mul(set1(weight.b), load(from + d));
    store(o + d, alone ? x : fma(set1(weight.a), load(o + d), x));
  }
}

// Merges the partials of a row in split order and writes the result.
template <class OnlyValue>
[[gnu::noinline]] void merge_row(const AttentionParams& p, const Plan& plan, const Sequence& s, int64_t kv_head,
                                 int64_t row, const OnlyValue& only_value) {
  alignas(64) float o[256];  // the largest head_dim
  SoftmaxState<Binary> state;
  std::memset(o, 0, static_cast<size_t>(plan.width) * sizeof(float));
  for (int64_t split = 0; split < s.splits.count; ++split) {
    const float* part = plan.partial(s, kv_head, row, split);
    const SoftmaxState<Binary> of_split{part[plan.width], part[plan.width + 1]};
    if (of_split.empty()) continue;
    merge_output(state, of_split, o, part, plan.width);
  }
  finish_row(p, s, kv_head, row, plan.group, state, o, only_value);
}

// Ends a unit: writes its rows, or their partials, and merges them if it is the last split of its rows to arrive.
template <class OnlyValue>
FLASHQ_SIMD void finish_unit(const AttentionParams& p, const Plan& plan, const Unit& u, const UnitRows& rows,
                             const OnlyValue& only_value) {
  const Sequence& s = *u.sequence;
  for (int64_t h = 0; h < u.heads; ++h)
    for (int64_t r = 0; r < u.rows; ++r) {
      const int64_t at = h * rows.head_rows + r;
      const SoftmaxState<Binary> state = rows.state[at].total();
      const float* acc = rows.acc + at * plan.width;
      if (s.splits.count == 1) {
        finish_row(p, s, u.head + h, u.row + r, plan.group, state, acc, only_value);
        continue;
      }
      float* part = plan.partial(s, u.head + h, u.row + r, u.split);
      std::memcpy(part, acc, static_cast<size_t>(plan.width) * sizeof(float));
      part[plan.width] = state.max;
      part[plan.width + 1] = state.sum;
    }
  if (s.splits.count == 1 || !plan.arrive_last(u)) return;
  for (int64_t h = 0; h < u.heads; ++h)
    for (int64_t r = 0; r < u.rows; ++r) merge_row(p, plan, s, u.head + h, u.row + r, only_value);
}

}  // namespace
}  // namespace flashq::FLASHQ_ISA
