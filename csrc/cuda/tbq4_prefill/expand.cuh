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

// The units of a warp, of keys and of values: its number and every kExpanders-th from there on. Addresses are a lane's,
// which do not change, plus the tile's: with them worked out anew a unit takes a quarter more instructions.
template <class C> class UnitExpander {
  static constexpr int kMost = (C::kUnits + C::kExpanders - 1) / C::kExpanders;
  static constexpr int kMore = C::kUnits - (kMost - 1) * C::kExpanders;  // warps that have kMost units
  using RawTile = typename C::RawTile;

 public:
  __device__ __forceinline__ UnitExpander(const LevelBytes (&levels)[32], int warp, int lane)
      : levels_(levels[lane]), more_(warp < kMore) {
    const UnitPlace place = place_in_unit<C>(lane);
    const int key = warp * C::kUnitKeys + place.key, quarter = place.quarter;
    from_ = key * (C::kDim / 2) + quarter * 16;
    norm_ = (key * C::kBlocks + quarter / 4 % C::kBlocks) * 2;
    // All of a lane's keys have the same place in the swizzle.
    static_assert(C::kExpanders * C::kUnitKeys % 8 == 0);
    to_ = quarter / 2 * (C::kTileK * 128) + key * 128 + ((quarter % 2 * 4) ^ (key % 8)) * 16;
  }

  // The codes of the first unit, for expand().
  __device__ __forceinline__ uint4 load_first(const RawTile& raw) const { return load_unit(raw, 0); }
  // Expands all units into `tile`, an address in shared memory. Norms of the tile are factors of values, and of head
  // dim 256 of keys.
  template <bool kValues> __device__ __forceinline__ void expand(const RawTile& raw, uint4 codes, uint32_t tile) const {
#pragma unroll
    for (int i = 0; i < kMost; ++i) {
      if (i == kMost - 1 && !more_) break;
      constexpr bool kScaled = kValues || C::kBlocks == 2;
      const uint32_t words[4] = {codes.x, codes.y, codes.z, codes.w},
                     factor = kScaled ? factor_of(raw, i * C::kExpanders) : 0;
      if (i + 1 < kMost && (i + 1 < kMost - 1 || more_)) codes = load_unit(raw, i + 1);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        uint32_t values[4];
        look_up_levels(levels_, words[j], values);
        if constexpr (kScaled) {
#pragma unroll
          for (uint32_t& pair : values) pair = multiply(pair, factor);
        }
        store_chunk(tile + (to_ ^ j * 16) + i * kTileStep, values);
      }
    }
  }
  // What rounding what expand() makes has left. Rare.
  __device__ __forceinline__ void expand_rest(const RawTile& raw, uint32_t tile) const {
    const auto left = [](uint32_t code, uint32_t bits) {
      return fmaf(kDeviceCentroids[1][static_cast<int>(code & 15)], 1 / kTableUnit,
                  -half_to_float(static_cast<uint16_t>(bits)));
    };
#pragma unroll 1
    for (int i = 0; i < kMost - !more_; ++i) {
      const uint32_t factor = C::kBlocks == 2 ? factor_of(raw, i * C::kExpanders) : 0;
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const auto codes = load<uint32_t>(&raw.codes[0][0] + from_ + i * kCodesStep + j * 4);
        uint32_t values[4];
        look_up_levels(levels_, codes, values);
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          const uint32_t pair = values[k];
          values[k] = ptx::pack<Float16>(left(codes >> (8 * k), pair), left(codes >> (8 * k + 4), pair >> 16));
          if constexpr (C::kBlocks == 2)
            values[k] = fuse(values[k], factor, fuse(pair, factor, multiply(pair, factor) ^ 0x80008000));
        }
        store_chunk(tile + (to_ ^ j * 16) + i * kTileStep, values);
      }
    }
  }

 private:
  static constexpr int kCodesStep = C::kExpanders * 512, kTileStep = C::kExpanders * C::kUnitKeys * 128;

  __device__ __forceinline__ uint4 load_unit(const RawTile& raw, int i) const {
    return load<uint4>(&raw.codes[0][0] + from_ + i * kCodesStep);
  }
  // What a lane's values of the unit so many after its first one are multiplied by: fp16 twice.
  __device__ __forceinline__ uint32_t factor_of(const RawTile& raw, int units) const {
    return *reinterpret_cast<const uint16_t*>(reinterpret_cast<const char*>(raw.norms) + norm_ +
                                              units * (C::kUnitKeys * C::kBlocks * 2)) *
           0x10001u;
  }

  LevelBytes levels_;
  bool more_;        // the warp has kMost units, not one less
  int from_, norm_;  // of a lane, in bytes
  uint32_t to_;      // where the first of its four chunks goes: chunk j to that ^ 16 j
};

}  // namespace flashq::cuda::tbq4_sm90
