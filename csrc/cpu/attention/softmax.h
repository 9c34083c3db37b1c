// The online softmax of one row of scores over one 64-key tile.
#pragma once
#include <math.h>

#include "core/softmax_state.h"
#include "cpu/simd/simd.h"
#include "params.h"

namespace flashq::FLASHQ_ISA {
namespace {

constexpr int kN = kTileK / kLanes;  // vectors of a row of scores

struct RowState {
  float max;  // of the scores, base 2
  VecF sum;   // of exp2(score - max), one partial sum a lane: summed up once, at the end

  FLASHQ_SIMD SoftmaxState<Binary> total() const { return {max, reduce_add(sum)}; }
};
FLASHQ_SIMD RowState empty_row() { return {-kInf, zero()}; }

// From q.k to a score in base 2: last * factor * q.k, or last * gain * tanh(factor * q.k / cap). log2(e) is part of the
// factor or gain that comes last, one rounding less, unless their product overflows: then it is `last`. So is the cap
// part of the factor (cap 1) unless their quotient leaves float32.
struct ScoreRule {
  float factor, cap, gain, last;  // cap 0: off; last is 1 or log2(e)

  FLASHQ_SIMD explicit ScoreRule(const ScoreOptions& o)
      : factor(o.scale), cap(o.softcap), gain(o.softcap), last(kLog2E) {
    const float quotient = o.scale / o.softcap;
    if (cap != 0 && __builtin_isnormal(quotient)) {
      factor = quotient;
      cap = 1;
    }
    float& outer = cap != 0 ? gain : factor;
    if (!__builtin_isfinite(outer * kLog2E)) return;
    outer *= kLog2E;
    last = 1;
  }
};

// s holds q.k (times row_scale) for 64 keys; `bias`, if not null, is added to it before scaling. `bits` says which keys
// the row sees. x becomes exp2(score - running maximum), 0 where the bit is not set, whatever s is there. `acc`
// (acc_size floats, a multiple of kLanes) shrinks when the maximum grows. Returns the tile's maximum, -inf for no key.
template <int kDegree>
FLASHQ_SIMD float softmax_row(const float* s, const float* bias, uint64_t bits, const ScoreRule& rule, RowState& row,
                              float* acc, int64_t acc_size, VecF (&x)[kN]) {
#pragma GCC unroll 16
  for (int j = 0; j < kN; ++j) x[j] = load(s + j * kLanes);
  if (bias)
#pragma GCC unroll 16
    for (int j = 0; j < kN; ++j) x[j] = add(x[j], load(bias + j * kLanes));
#pragma GCC unroll 16
  for (int j = 0; j < kN; ++j) x[j] = mul(x[j], set1(rule.factor));
  if (rule.cap != 0) [[unlikely]]
#pragma GCC unroll 1
    for (int j = 0; j < kN; ++j) x[j] = mul(tanh(div(x[j], set1(rule.cap))), set1(rule.gain));
  if (rule.last != 1) [[unlikely]]
#pragma GCC unroll 1
    for (int j = 0; j < kN; ++j) x[j] = mul(x[j], set1(rule.last));
  if (~bits)
#pragma GCC unroll 16
    for (int j = 0; j < kN; ++j) x[j] = keep_bits(x[j], bits >> (j * kLanes), set1(-kInf));
  VecF top = x[0];
#pragma GCC unroll 16
  for (int j = 1; j < kN; ++j) top = max(top, x[j]);
  const float tile_max = reduce_max(top);  // may miss a NaN; the sum below does not
  if (tile_max > row.max) {
    if (row.max != -kInf) {  // else nothing is accumulated yet
      const VecF shrink = set1(exp2f(row.max - tile_max));
      row.sum = mul(row.sum, shrink);
      for (int64_t d = 0; d < acc_size; d += kLanes) store(acc + d, mul(load(acc + d), shrink));
    }
    row.max = tile_max;
  }
  const VecF base = set1(row.max == -kInf ? 0.f : row.max);  // nothing but -inf so far: exp2(-inf - 0) = 0
#pragma GCC unroll 16
  for (int j = 0; j < kN; ++j) {
    x[j] = exp2<kDegree>(sub(x[j], base));
    row.sum = add(row.sum, x[j]);
  }
  return tile_max;
}

}  // namespace
}  // namespace flashq::FLASHQ_ISA
