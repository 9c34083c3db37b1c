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
