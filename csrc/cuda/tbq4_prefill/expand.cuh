// From codes to fp16 in the layout that wgmma reads: boxes of 64 columns in the 128-byte swizzle.
//
// A byte of codes, two neighbouring dims, becomes a pair of fp16 levels by one load from a table in shared memory that
// has a copy for each lane. Norms stay outside (they multiply scores and weights); of head dim 256, where a key has
// two, the larger one's power of two does, and values are multiplied by what is left.
#pragma once
#include "cuda/tbq4_attention/operands.cuh"
#include "cuda/tbq4_prefill/traits.cuh"

namespace flashq::cuda::tbq4_sm90 {

// By all threads.
__device__ __forceinline__ void fill_pairs(uint32_t (&pairs)[kPairs][32]) {
  const auto rounded = [](int code) { return uint32_t{float_to_half(kDeviceCentroids[1][code] * kTableScale)}; };
  for (int i = static_cast<int>(threadIdx.x); i < kPairs * 8; i += static_cast<int>(blockDim.x)) {
    const uint32_t pair = rounded(i / 8 % 16) | rounded(i / 128) << 16;
    store(&pairs[i / 8][i % 8 * 4], Vector<uint32_t, 4>{pair, pair, pair, pair});
  }
}

// Where a thread's 16 bytes of codes of a unit are: of key `key` of the tile, bytes 16 quarter and on.
struct UnitPlace { int key, quarter; };
template <class C>
__device__ __forceinline__ UnitPlace place_unit(int thread, int unit) {
  const int lane = thread % 32, first = thread / 32 * C::kWarpKeys;
  if (C::kDim == 64) return {first + unit * 16 + lane % 8 + lane / 16 * 8, lane / 8 % 2};
  if (C::kDim == 128) return {first + unit * 8 + lane % 8, lane / 8};
  return {first + unit / 2 * 8 + lane % 8, unit % 2 * 4 + lane / 8};
}

// The two fp16 values of a code byte. kRest: what rounding them has left.
template <bool kRest>
__device__ __forceinline__ uint32_t levels_of(const char* pairs, uint32_t lane4, uint32_t word, int byte) {
  // 128 bytes a row.
  const uint32_t at = ((byte == 0 ? word << 7 : word >> (8 * byte - 7)) & 0x7f80) | lane4;
  const uint32_t pair = *reinterpret_cast<const uint32_t*>(pairs + at);
  if constexpr (!kRest) return pair;
  const auto left = [&](int code, uint32_t bits) {
    return kDeviceCentroids[1][code] / kTableUnit - half_to_float(static_cast<uint16_t>(bits));
  };
  const uint32_t codes = word >> (8 * byte);
  return ptx::pack<Float16>(left(codes & 15, pair), left(codes >> 4 & 15, pair >> 16));
}

// Of pairs of fp16 values: a * b, and a * b + c rounded once.
__device__ __forceinline__ uint32_t multiply(uint32_t a, uint32_t b) {
  uint32_t x;
  asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(x) : "r"(a), "r"(b));
  return x;
}
__device__ __forceinline__ uint32_t fuse(uint32_t a, uint32_t b, uint32_t c) {
  uint32_t x;
  asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(x) : "r"(a), "r"(b), "r"(c));
  return x;
}

// The values of a unit, in the order of its codes. `factor`: fp16 twice, of head dim 256.
template <class C, bool kRest>
__device__ __forceinline__ void read_unit(const char* pairs, uint32_t lane4, const uint4& codes, uint32_t factor,
                                          uint32_t (&values)[16]) {
  const uint32_t words[4] = {codes.x, codes.y, codes.z, codes.w};
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    uint32_t pair = levels_of<false>(pairs, lane4, words[i / 4], i % 4);
    if constexpr (C::kBlocks == 2) {
      const uint32_t product = multiply(pair, factor);
      if constexpr (kRest) {
        const uint32_t left = fuse(pair, factor, product ^ 0x80008000);  // exact
        pair = fuse(levels_of<true>(pairs, lane4, words[i / 4], i % 4), factor, left);
      } else {
        pair = product;
      }
    } else if constexpr (kRest) {
      pair = levels_of<true>(pairs, lane4, words[i / 4], i % 4);
    }
    values[i] = pair;
  }
}
// `tile` is an address in shared memory.
template <class C>
__device__ __forceinline__ void store_unit(uint32_t tile, int thread, int unit, const uint32_t (&values)[16]) {
  const UnitPlace place = place_unit<C>(thread, unit);
  // Keys of a lane are its number modulo 8.
  const uint32_t row =
      tile + place.quarter / 2 * (C::kTileK * 128) + place.key * 128 + ((place.quarter % 2 * 4) ^ (thread % 8)) * 16;
#pragma unroll
  for (int i = 0; i < 4; ++i)
    asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(row ^ i * 16), "r"(values[4 * i]),
                 "r"(values[4 * i + 1]), "r"(values[4 * i + 2]), "r"(values[4 * i + 3])
                 : "memory");
}

}  // namespace flashq::cuda::tbq4_sm90
