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

// From q.k to a score in base 2: factor * q.k, and where `natural` that is a natural one still, to be capped and
// multiplied by log2(e). No other order of the factors works for every finite scale and soft cap: their quotient or
// their product with log2(e) overflows.
struct ScoreRule {
  bool natural;
  float factor, cap;  // cap 0: off

  FLASHQ_SIMD explicit ScoreRule(const ScoreOptions& o)
      : natural(o.softcap > 0 || !__builtin_isfinite(o.scale * kLog2E)),
        factor(natural ? o.scale : o.scale * kLog2E),
        cap(o.softcap) {}
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
  if (rule.natural) [[unlikely]]
#pragma GCC unroll 1
    for (int j = 0; j < kN; ++j) {
      if (rule.cap != 0) x[j] = mul(tanh(div(x[j], set1(rule.cap))), set1(rule.cap));
      x[j] = mul(x[j], set1(kLog2E));
    }
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
