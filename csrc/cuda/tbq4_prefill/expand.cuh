// From codes to fp16 in the layout that wgmma reads: boxes of 64 columns in the 128-byte swizzle.
//
// Levels are symmetric: eight magnitudes, whose low and high bytes PRMT finds for four codes at a time, and a sign. A
// table in shared memory would take fewer instructions, but shared memory is what the products of a tile, too, are
// limited by. Norms stay outside (they multiply scores and weights); of head dim 256, where a key has two, the larger
// one's power of two does, and values are multiplied by what is left.
#pragma once
#include "cuda/tbq4_attention/operands.cuh"
#include "cuda/tbq4_prefill/traits.cuh"

namespace flashq::cuda::tbq4_sm90 {

__device__ __forceinline__ uint32_t pick_bytes(uint32_t a, uint32_t b, uint32_t which) {
  uint32_t x;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(x) : "r"(a), "r"(b), "r"(which));
  return x;
}

// The fp16 levels of eight codes, in order.
__device__ __forceinline__ void look_up_levels(const LevelBytes& levels, uint32_t codes, uint32_t (&values)[4]) {
  const uint32_t positive = codes >> 3 & 0x11111111;           // codes of 8 and above,
  const uint32_t index = (codes ^ positive * 7) & 0x77777777;  // which are mirrored
  const uint32_t even_signs = codes << 4, high_index = index >> 16;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const uint32_t which = i == 0 ? index : high_index;
    const uint32_t low = pick_bytes(levels.low[0], levels.low[1], which);
    const uint32_t signs = pick_bytes(even_signs, codes, i == 0 ? 0x5140 : 0x7362);
    const uint32_t high = pick_bytes(levels.high[0], levels.high[1], which) ^ (signs & 0x80808080);
    values[2 * i] = pick_bytes(low, high, 0x5140);
    values[2 * i + 1] = pick_bytes(low, high, 0x7362);
  }
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

// Where a lane's 16 bytes of codes are in a unit of 512: key `key`, bytes 16 quarter and on. Eight lanes read, and
// write chunks of the swizzle, at different banks.
struct UnitPlace { int key, quarter; };
template <class C> __device__ __forceinline__ UnitPlace place_in_unit(int lane) {
  if (C::kDim == 64) return {lane % 4 + lane / 8 * 4, lane / 4 % 2};
  if (C::kDim == 128) return {lane % 2 + (lane / 8 ^ lane / 4 % 2) * 2, lane / 2 % 4};
  return {lane / 2 % 4 ^ lane / 8, lane % 8};
}

__device__ __forceinline__ void store_chunk(uint32_t to, const uint32_t (&values)[4]) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(values[0]), "r"(values[1]), "r"(values[2]),
               "r"(values[3])
               : "memory");
}

// Where a lane writes the four chunks of its codes: at `row` ^ 16 i. `tile` is an address in shared memory.
template <class C> __device__ __forceinline__ uint32_t chunks_of(uint32_t tile, int key, int quarter) {
  return tile + quarter / 2 * (C::kTileK * 128) + key * 128 + ((quarter % 2 * 4) ^ (key % 8)) * 16;
}
// Of head dim 256 what a lane's values are multiplied by: fp16 twice.
template <class C> __device__ __forceinline__ uint32_t factor_of(const typename C::RawTile& raw, int key, int quarter) {
  return C::kBlocks == 2 ? raw.norms[key][quarter / 4 % C::kBlocks] * 0x10001u : 0;
}

// Expands unit `unit` of `raw` into `tile`.
template <class C> __device__ __forceinline__ void expand_unit(const LevelBytes& levels, const typename C::RawTile& raw,
                                                               uint32_t tile, int unit, UnitPlace place) {
  const int key = unit * C::kUnitKeys + place.key;
  const uint4 codes = load<uint4>(&raw.codes[key][place.quarter * 16]);
  const uint32_t words[4] = {codes.x, codes.y, codes.z, codes.w};
  const uint32_t factor = factor_of<C>(raw, key, place.quarter), row = chunks_of<C>(tile, key, place.quarter);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    uint32_t values[4];
    look_up_levels(levels, words[i], values);
    if constexpr (C::kBlocks == 2) {
#pragma unroll
      for (uint32_t& pair : values) pair = multiply(pair, factor);
    }
    store_chunk(row ^ i * 16, values);
  }
}

// What rounding what expand_unit() makes has left. Rare.
template <class C> __device__ __forceinline__ void expand_rest(const LevelBytes& levels, const typename C::RawTile& raw,
                                                               uint32_t tile, int unit, UnitPlace place) {
  const auto left = [](uint32_t code, uint32_t bits) {
    return fmaf(kDeviceCentroids[1][static_cast<int>(code & 15)], 1 / kTableUnit,
                -half_to_float(static_cast<uint16_t>(bits)));
  };
  const int key = unit * C::kUnitKeys + place.key;
  const uint32_t factor = factor_of<C>(raw, key, place.quarter), row = chunks_of<C>(tile, key, place.quarter);
#pragma unroll 1
  for (int i = 0; i < 4; ++i) {
    const auto codes = load<uint32_t>(&raw.codes[key][place.quarter * 16 + i * 4]);
    uint32_t values[4];
    look_up_levels(levels, codes, values);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const uint32_t pair = values[j];
      values[j] = ptx::pack<Float16>(left(codes >> (8 * j), pair), left(codes >> (8 * j + 4), pair >> 16));
      if constexpr (C::kBlocks == 2)
        values[j] = fuse(values[j], factor, fuse(pair, factor, multiply(pair, factor) ^ 0x80008000));
    }
    store_chunk(row ^ i * 16, values);
  }
}

}  // namespace flashq::cuda::tbq4_sm90
