// The state of an online softmax and the one rule that merges two of them.
//
// A row that has seen some keys is (max, sum, o): the largest score, sum of exp(score - max), and o = sum of
// exp(score - max) * v. Two such rows over disjoint keys merge to a third: a commutative monoid up to rounding, with
// the identity (-inf, 0, 0). Tiles, KV splits, sinks and merge_states all combine by `merge` below.
#pragma once
#include <cmath>

#include "core/portability.h"

namespace flashq {

// The unit of `max`. Kernels keep scores times log2(e), because exp2 is what the hardware has; merge_states gets
// natural logarithms and must return a lone one unchanged to the last bit.
struct Binary {
  static FLASHQ_HD float exp(float x) { return exp2f(x); }
  static FLASHQ_HD float to_natural(float x) { return x * kLn2; }
};
struct Natural {
  static FLASHQ_HD float exp(float x) { return expf(x); }
  static FLASHQ_HD float to_natural(float x) { return x; }
};

template <class Unit> struct SoftmaxState {
  float max = -kInf, sum = 0;

  // No key seen, or only keys whose score is -inf.
  FLASHQ_HD bool empty() const { return max == -kInf && sum == 0; }
  // Natural logarithm of the sum of exp(score); -inf for the identity.
  FLASHQ_HD float lse() const { return Unit::to_natural(max) + logf(sum); }
};

struct MergeWeights {
  float a, b;  // what o of either side is multiplied by
};

// a <- a merged with b; the caller applies the weights to o. An empty side weighs 0: leave its o out, whatever it
// holds, and the other side keeps its bits. A side that is not empty may weigh 0 too, by underflow: its o still counts,
// because a NaN in it has to stay. A NaN maximum or sum stays NaN.
template <class Unit> FLASHQ_HD MergeWeights merge(SoftmaxState<Unit>& a, const SoftmaxState<Unit>& b) {
  if (b.empty()) return {1, 0};
  if (a.empty()) {
    a = b;
    return {0, 1};
  }
  const float top = fmaxf(a.max, b.max);  // of a NaN and a number: the number, and the weight below is NaN
  const MergeWeights weight{Unit::exp(a.max - top), Unit::exp(b.max - top)};
  a = {top, weight.a * a.sum + weight.b * b.sum};
  return weight;
}

// The same rule for several partials at once: what the sum and o of one of them are multiplied by when the largest
// maximum is `top`. Of an empty one it is 0: leave its o out.
template <class Unit> FLASHQ_HD float merge_weight(const SoftmaxState<Unit>& part, float top) {
  return part.empty() ? 0 : Unit::exp(part.max - top);
}

// The same rule for kCount partials at once, given by their logarithms, for one exp each instead of two. Returns the
// state of them all; weight[k] is what the o of partial k is multiplied by. Of an empty one it is 0: leave its o out.
template <class Unit, int kCount>
FLASHQ_HD SoftmaxState<Unit> merge_all(const float (&lse)[kCount], float (&weight)[kCount]) {
  SoftmaxState<Unit> all;
  for (int k = 0; k < kCount; ++k) all.max = fmaxf(all.max, lse[k]);
  for (int k = 0; k < kCount; ++k) {
    weight[k] = lse[k] == -kInf ? 0 : Unit::exp(lse[k] - all.max);
    all.sum += weight[k];
  }
  return all;
}

}  // namespace flashq
