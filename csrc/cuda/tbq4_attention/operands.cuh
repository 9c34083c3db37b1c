// From codes to operands of mma.m16n8k16.f16.
//
// One code byte, two codes, becomes two fp16 values by one table read: 256 entries, one copy for each lane, rows of 256
// bytes, so that the byte address of an entry is [4 * lane, byte, 0, 0]: one PRMT and one conflict-free load (4.58 TB/s
// of codes where a shift and a mask reach 4.25, both without anything else). Only half of each row is used; the
// rests of queries are in the other.
#pragma once
#include "core/half.h"
#include "core/tbq4/codebook.h"
#include "cuda/ptx/mma.cuh"
#include "cuda/tbq4/lanes.cuh"

namespace flashq::cuda {

inline constexpr int kPairTableBytes = 256 * 256;

// The table holds centroids of width 128 times this, the factor whose roundings to fp16 hurt least: 4.5e-5 rms instead
// of 1.6e-4. kTableUnit brings an entry back, again with the least error.
inline constexpr float kTableScale = 1.46931458f, kTableUnit = .999867f / kTableScale;
// Levels of width 64 are those of width 128 times sqrt(2).
template <int kWidth> inline constexpr float kLevelUnit = kWidth == 64 ? kTableUnit * 1.41421356f : kTableUnit;

// A level of width 128 in the table, and what rounding it to fp16 has left.
__device__ __forceinline__ uint16_t table_level(int code) {
  return float_to_half(kDeviceCentroids[1][code] * kTableScale);
}
__device__ __forceinline__ uint16_t table_rest(int code) {
  return float_to_half(kDeviceCentroids[1][code] / kTableUnit - half_to_float(table_level(code)));
}

// All threads: fills the table of pairs. Every lane knows one level, so a shuffle is a look-up.
__device__ __forceinline__ void fill_table(unsigned char* table) {
  const uint32_t own = table_level(static_cast<int>(threadIdx.x) % tbq4::kLevels);
#pragma unroll 1
  for (int first = 0; first < 256 * 8; first += static_cast<int>(blockDim.x)) {
    const int i = first + static_cast<int>(threadIdx.x);
    const uint32_t pair = __shfl_sync(~0u, own, i >> 3 & 15) | __shfl_sync(~0u, own, i >> 7 & 15) << 16;
    if (i < 256 * 8) store(table + (i >> 3) * 256 + (i & 7) * 16, Vector<uint32_t, 4>{pair, pair, pair, pair});
  }
}

// The values of byte `k`, known to the compiler, of w. lane4 is 4 * lane.
__device__ __forceinline__ uint32_t expand(const unsigned char* table, uint32_t w, uint32_t lane4, int k) {
  return *reinterpret_cast<const uint32_t*>(table + __byte_perm(w, lane4, 0x5504u | static_cast<uint32_t>(k) << 4));
}
// The same of what rounding the levels has left. `rest`: table_rest(lane % 16).
__device__ __forceinline__ uint32_t expand_rest(uint32_t rest, uint32_t w, int k) {
  const uint32_t low = w >> (8 * k) & 15, high = w >> (8 * k + 4) & 15;
  return __shfl_sync(~0u, rest, static_cast<int>(low)) | __shfl_sync(~0u, rest, static_cast<int>(high)) << 16;
}

// The nibbles of two tokens in one byte each: `even` and `odd` elements.
struct TokenPair { uint32_t even, odd; };
__device__ __forceinline__ TokenPair pair_tokens(uint32_t first, uint32_t second) {
  constexpr uint32_t kLow = 0x0f0f0f0fu;
  const auto choose = [](uint32_t low, uint32_t high) {  // one LOP3
    uint32_t x;
    asm("lop3.b32 %0, %1, %2, %3, 0xca;" : "=r"(x) : "r"(kLow), "r"(low), "r"(high));
    return x;
  };
  return {choose(first, second << 4), choose(first >> 4, second)};
}

}  // namespace flashq::cuda
