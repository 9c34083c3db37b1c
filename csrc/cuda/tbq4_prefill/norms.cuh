// The norms of a producer lane's keys, and what they become: factors of scores and weights, and of values.
#pragma once
#include "cuda/tbq4_attention/operands.cuh"
#include "cuda/tbq4_attention/queries.cuh"
#include "cuda/tbq4_prefill/traits.cuh"

namespace flashq::cuda::tbq4_sm90 {

template <class C> using LaneNorms = uint32_t[C::kLaneKeys * C::kBlocks / 2];

template <class C> __device__ __forceinline__ uint16_t norm_of(const LaneNorms<C>& norms, int i) {
  return static_cast<uint16_t>(norms[i / 2] >> (16 * (i % 2)));
}
// Norms of values that decode to NaN become 0. poison: of which keys, by block.
template <class C>
__device__ __forceinline__ void take_poison(LaneNorms<C>& norms, uint32_t there, uint32_t (&poison)[C::kBlocks]) {
#pragma unroll
  for (int i = 0; i < C::kLaneKeys * C::kBlocks; ++i) {
    const uint32_t shift = 16 * (i % 2), infinite = 0x7c00u << shift;
    const bool bad = (norms[i / 2] & infinite) == infinite && there >> i / C::kBlocks & 1;
    if (bad) norms[i / 2] &= ~(0xffffu << shift);
    poison[i % C::kBlocks] |= static_cast<uint32_t>(bad) << i / C::kBlocks;
  }
}
// Norms of values, if they are not too different, become factors of values, below 2 and exact; else 1, or nothing of
// head dim 256. Returns what all weights of the tile are multiplied by then, or 0.
template <class C> __device__ __forceinline__ float share_unit(LaneNorms<C>& norms, uint32_t there) {
  constexpr int kCount = C::kLaneKeys * C::kBlocks;
  constexpr float kLeastShare = 1 / 64.f;  // of weights times norms at 2^7, all weights stay below kMostWeight
  float x[kCount], top = kLeastNorm, low = kInf;
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    x[i] = there >> i / C::kBlocks & 1 ? half_to_float(norm_of<C>(norms, i)) : 0;
    top = fmaxf(top, fabsf(x[i]));
    low = fminf(low, x[i] == 0 ? kInf : fabsf(x[i]));
  }
  top = float_of(__reduce_max_sync(~0u, bits_of(top)));  // of positive numbers the bits have the same order
  low = float_of(__reduce_min_sync(~0u, bits_of(low)));
  const bool even = low >= top * kLeastShare;
  const FloatUnit scaled(top);  // to 2^10 to 2^11
  constexpr float kDown = 0x1p-10f;
#pragma unroll
  for (int i = 0; i < kCount; i += 2) {
    const float inverse = scaled.inverse * kDown;
    if (even)
      norms[i / 2] = ptx::pack<Float16>(x[i] * inverse, x[i + 1] * inverse);
    else if (C::kBlocks == 1)
      norms[i / 2] = 0x3c003c00;
  }
  return even ? scaled.unit / kDown * kLevelUnit<C::kWidth> : 0;
}
// What a key's scores or weights are multiplied by, `scale` included. Of head dim 256, `norms` become what is left for
// its values. Returns the largest length.
template <class C>
__device__ __forceinline__ float finish_norms(LaneNorms<C>& norms, uint32_t there, float scale,
                                              float (&factor)[C::kLaneKeys]) {
  const float unit = kLevelUnit<C::kWidth> * scale;
  float longest = 0;
#pragma unroll
  for (int i = 0; i < C::kLaneKeys; ++i) {
    const bool real = there >> i & 1;
    const auto norm = [&](int j) {  // an infinite one decodes to +-Inf: NaN
      const float x = real ? half_to_float(norm_of<C>(norms, j)) : 0;
      return x + (x - x);
    };
    if constexpr (C::kBlocks == 1) {
      const float x = norm(i);
      factor[i] = x * unit;
      longest = fmaxf(longest, fabsf(x));
    } else {
      const float x = norm(2 * i), y = norm(2 * i + 1);
      const FloatUnit scaled(fmaxf(fabsf(x), fabsf(y)));  // to 2^10 to 2^11, NaN left out
      constexpr float kDown = 0x1p-10f;
      norms[i] = ptx::pack<Float16>(x * (scaled.inverse * kDown), y * (scaled.inverse * kDown));
      factor[i] = scaled.unit / kDown * unit;
      longest = fmaxf(longest, sqrtf(fmaf(x, x, y * y)));
    }
  }
  return longest;
}

}  // namespace flashq::cuda::tbq4_sm90
