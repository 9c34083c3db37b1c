// Decoding of many blocks: lanes of 32 values each share a block, so that a warp takes small steps and its stores start
// early.
//
// Stages across lanes exchange halves: each lane sends half of its values and goes on with both partners' other half,
// one shuffle for two values. Which half a lane keeps must not depend on the lane, or every value would be selected: so
// a lane's registers hold its values in an order of its own, register r the value r ^ order. Where two registers have
// swapped roles by that, a fused multiplication by the lane's +-1, which is exact, takes the right difference. No sum
// of the transform is -0, as no level is 0: so signs of zeros come out right, too.
//
// The halves are such that a lane ends with runs of 16 bytes and that the block's lanes hold neighbouring runs. Where
// each lane held 32 bytes in a row, its stores wrote every sector of the L2 in two halves, and heads of 64 took as long
// as heads of 128.
#pragma once
#include "core/half.h"
#include "core/tbq4/codec.h"
#include "cuda/tbq4/bulk_tables.cuh"
#include "cuda/tbq4/lanes.cuh"

namespace flashq::cuda {

// kRunValues: neighbouring values that a lane ends with, 4 or 8.
template <int kWidth, int kRunValues> class DecodeLanes {
 public:
  static constexpr int kValues = 32, kLanes = kWidth / kValues, kBlocks = 32 / kLanes;  // of a warp
  static constexpr int kRun = kRunValues, kWords = kValues / 8;
  static_assert((kLanes == 2 || kLanes == 4) && (kRun == 4 || kRun == 8));

  __device__ __forceinline__ DecodeLanes() {
    const int lane = static_cast<int>(threadIdx.x) % kLanes;
    near_ = lane / (kLanes / 2);
    far_ = kLanes == 4 ? lane & 1 : 0;
    near_sign_ = near_ ? -1.f : 1.f;
    far_sign_ = far_ ? -1.f : 1.f;
    constexpr Signs signs = signs_of_lanes();
#pragma unroll
    for (int word = 0; word < kWords; ++word) flips_[word] = of_lane(signs.flips[word]);
    const uint32_t negated = of_lane(signs.negated);
#pragma unroll
    for (int i = 0; i < kValues; ++i)
      scales_[i] = tbq4::flip(tbq4::kInvSqrtWidth<kWidth>, negated << (31 - i) & 0x80000000);
  }

  // Codes of the lane's 32 values, as they lie at `from`; null: any.
  __device__ __forceinline__ void load_codes(const uint8_t* from, uint32_t (&codes)[kWords]) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      Vector<uint32_t, 2> two{};
      if (from) two = load<Vector<uint32_t, 2>>(from + (kRun == 8 ? half ^ far_ : half) * 8);
      codes[2 * half] = two.value[0];
      codes[2 * half + 1] = two.value[1];
    }
  }

  // Where the lane's values of a run start in the block.
  __device__ __forceinline__ int first_value(int run) const { return value_of(run * kRun, near_, far_); }

  // Codes of load_codes(), table of fill_levels<kWidth>. All lanes of a warp take part.
  __device__ __forceinline__ void decode(const uint32_t (&codes)[kWords], uint16_t norm, const char* levels,
                                         float (&v)[kValues]) const {
    const uint32_t lane_offset = threadIdx.x % 16 * 8;
#pragma unroll
    for (int word = 0; word < kWords; ++word) {
      // Ordered here, where the loads had time to arrive.
      const uint32_t flipped = ordered(codes, word) ^ flips_[word];
      const auto pair_at = [&](int i, uint32_t offset) {
        const auto pair = *reinterpret_cast<const float2*>(levels + offset);
        v[8 * word + 2 * i] = pair.x;
        v[8 * word + 2 * i + 1] = pair.y;
      };
      pair_at(0, table_offset<0>(flipped, lane_offset));
      pair_at(1, table_offset<1>(flipped, lane_offset));
      pair_at(2, table_offset<2>(flipped, lane_offset));
      pair_at(3, table_offset<3>(flipped, lane_offset));
    }
    stages<1>(v);
    if constexpr (kLanes == 4) exchange<2 * kRun, 1>(v, far_sign_);
    exchange<kRun, kLanes / 2>(v, near_sign_);

    const float scale = half_to_float(norm);
#pragma unroll
    for (int i = 0; i < kValues; ++i) v[i] = ieee::mul(ieee::mul(v[i], scales_[i]), scale);
  }

 private:
  // The value of the block that register r holds in the end. The exchanges swapped bits of r with the lane's.
  static FLASHQ_HD constexpr int value_of(int r, int near, int far) {
    const int near_bit = r / kRun & 1, far_bit = r / (2 * kRun) & 1;
    if constexpr (kLanes == 2) return r - near_bit * kRun + near * kRun + near_bit * kValues;
    return r % kRun + r / (4 * kRun) * (4 * kRun) + near * kRun + far * 2 * kRun + far_bit * kValues +
           near_bit * 2 * kValues;
  }

  // What the signs of the format do to the values of each lane.
  using OfLanes = tbq4::Table<uint32_t, kLanes>;
  struct Signs {
    OfLanes flips[kWords];  // of words of codes: a level's negative is the level of the complemented code
    OfLanes negated;        // a bit for each register at the end
  };
  static FLASHQ_HD constexpr Signs signs_of_lanes() {
    Signs signs{};
    for (int lane = 0; lane < kLanes; ++lane) {
      const int near = lane / (kLanes / 2), far = kLanes == 4 ? lane & 1 : 0, order = (2 * far + near) * kRun;
      for (int r = 0; r < kValues; ++r) {
        const int value = lane * kValues + (r ^ order);
        signs.flips[r / 8].value[lane] |= (tbq4::sign_bit<tbq4::Sign::kOut>(value) >> 31) * (15u << (4 * (r % 8)));
        signs.negated.value[lane] |= tbq4::sign_bit<tbq4::Sign::kIn>(value_of(r, near, far)) >> 31 << r;
      }
    }
    return signs;
  }
  // Selected among constants: cheaper than worked out, and than waiting for memory.
  __device__ __forceinline__ uint32_t of_lane(const OfLanes& constants) const {
    if constexpr (kLanes == 2) return near_ ? constants[1] : constants[0];
    const uint32_t low = far_ ? constants[1] : constants[0],
                   high = far_ ? constants[kLanes - 1] : constants[2 % kLanes];
    return near_ ? high : low;
  }

  // The word of codes that the lane's order puts first, second ...; load_codes() has done a part of it.
  __device__ __forceinline__ uint32_t ordered(const uint32_t (&codes)[kWords], int word) const {
    if constexpr (kRun == 8) return near_ ? codes[word ^ 1] : codes[word];
    const uint32_t swapped = far_ ? codes[word ^ 1] : codes[word];
    return __byte_perm(swapped, 0, near_ ? 0x1032 : 0x3210);  // the halves of a word
  }

  // The stages within a lane, from that of kHalf on.
  template <int kHalf> __device__ __forceinline__ void stages(float (&v)[kValues]) const {
    if constexpr (kHalf == kRun)
      swapped_stage<kHalf>(v, near_sign_);
    else if constexpr (kHalf == 2 * kRun && kLanes == 4)
      swapped_stage<kHalf>(v, far_sign_);
    else
      tbq4::butterfly_stage<kValues, kHalf>(v);
    if constexpr (2 * kHalf < kValues) stages<2 * kHalf>(v);
  }

  // The stage of the bit that the lanes of sign -1 hold swapped. What exchange() sends is multiplied by the sign.
  template <int kBit> static __device__ __forceinline__ void swapped_stage(float (&v)[kValues], float sign) {
#pragma unroll
    for (int r = 0; r < kValues; ++r) {
      if (r & kBit) continue;
      const float kept = v[r], sent = v[r + kBit];
      v[r] = __fmaf_rn(sign, kept, sent);
      v[r + kBit] = __fmaf_rn(sign, kept, -sent);
    }
  }

  // The stage across lanes that differ in kStep. Of what a lane keeps and gets, the sums are of the lower lane's
  // values, the differences of the upper lane's: register r of bit kBit clear, and set.
  template <int kBit, int kStep> static __device__ __forceinline__ void exchange(float (&v)[kValues], float sign) {
#pragma unroll
    for (int r = 0; r < kValues; ++r) {
      if (r & kBit) continue;
      const float kept = v[r], got = __shfl_xor_sync(kWholeWarp, v[r + kBit], kStep);  // times minus the sign
      v[r] = __fmaf_rn(-sign, got, kept);
      v[r + kBit] = __fmaf_rn(sign, kept, got);
    }
  }

  // Bits of the lane's place in its block, by how far apart it and its partner end up: kRun values, or 2 * kRun.
  int near_, far_;
  float near_sign_, far_sign_;
  uint32_t flips_[kWords];
  float scales_[kValues];
};

}  // namespace flashq::cuda
