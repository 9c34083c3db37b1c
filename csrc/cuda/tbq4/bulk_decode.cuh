// Decoding of many blocks: lanes of 32 values each share a block, so that a warp takes small steps and its stores start
// early.
//
// Stages across lanes exchange halves: each lane sends half of its values and goes on with both partners' other half,
// one shuffle for two values. Which half a lane keeps must not depend on the lane, or every value would be selected: so
// a lane's registers hold its values in an order of its own, register r the value r ^ order. Where two registers have
// swapped roles by that, a fused multiplication by the lane's +-1, which is exact, takes the right difference. No sum
// of the transform is -0, as no level is 0: so signs of zeros come out right, too.
#pragma once
#include "core/half.h"
#include "core/tbq4/codec.h"
#include "cuda/tbq4/bulk_tables.cuh"
#include "cuda/tbq4/lanes.cuh"

namespace flashq::cuda {

template <int kWidth> class DecodeLanes {
 public:
  static constexpr int kValues = 32, kLanes = kWidth / kValues, kBlocks = 32 / kLanes;  // of a warp
  static constexpr int kRun = 8, kRuns = kValues / kRun;  // neighbouring values that a lane ends with
  static_assert(kLanes == 2 || kLanes == 4);

  __device__ __forceinline__ DecodeLanes() {
    const int lane = static_cast<int>(threadIdx.x) % kLanes;
    odd_ = lane & 1;
    upper_ = lane >> 1;
    odd_sign_ = odd_ ? -1.f : 1.f;
    upper_sign_ = upper_ ? -1.f : 1.f;
    constexpr Signs signs = signs_of_lanes();
#pragma unroll
    for (int word = 0; word < kRuns; ++word) flips_[word] = of_lane(signs.flips[word]);
    const uint32_t negated = of_lane(signs.negated);
#pragma unroll
    for (int i = 0; i < kValues; ++i)
      scales_[i] = tbq4::flip(tbq4::kInvSqrtWidth<kWidth>, negated << (31 - i) & 0x80000000);
  }

  // Codes of the lane's 32 values, as they lie at `from`; null: any.
  __device__ __forceinline__ void load_codes(const uint8_t* from, uint32_t (&codes)[kRuns]) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      Vector<uint32_t, 2> two{};
      if (from) two = load<Vector<uint32_t, 2>>(from + (half ^ odd_) * 8);
      codes[2 * half] = two.value[0];
      codes[2 * half + 1] = two.value[1];
    }
  }

  // Where the lane's eight values of a run start in the block.
  __device__ __forceinline__ int first_value(int run) const { return first_value(run, odd_, upper_); }

  // Codes of load_codes(), table of fill_levels<kWidth>. All lanes of a warp take part.
  __device__ __forceinline__ void decode(const uint32_t (&codes)[kRuns], uint16_t norm, const char* levels,
                                         float (&v)[kValues]) const {
    const uint32_t lane_offset = threadIdx.x % 16 * 8;
#pragma unroll
    for (int word = 0; word < kRuns; ++word) {
      // Selected here, where the loads had time to arrive.
      const uint32_t flipped = (upper_ ? codes[word ^ 1] : codes[word]) ^ flips_[word];
      const auto pair_at = [&](int i, uint32_t offset) {
        const auto pair = *reinterpret_cast<const float2*>(levels + offset);
        v[8 * word + 2 * i] = pair.x;
        v[8 * word + 2 * i + 1] = pair.y;
      };
      pair_at(0, table_offset<0>(flipped, lane_offset));
      pair_at(1, table_offset<1>(flipped, lane_offset));
      pair_at(2, table_offset<2>(flipped, lane_offset));
      pair_at(3, table_offset<3>(flipped, lane_offset));
      tbq4::hadamard<8>(v + 8 * word);
    }
    if constexpr (kLanes == 4)
      swapped_stage<8>(v, upper_sign_);
    else
      tbq4::butterfly_stage<kValues, 8>(v);
    swapped_stage<16>(v, odd_sign_);
    exchange<16, 1>(v, odd_sign_);
    if constexpr (kLanes == 4) exchange<8, 2>(v, upper_sign_);

    const float scale = half_to_float(norm);
#pragma unroll
    for (int i = 0; i < kValues; ++i) v[i] = ieee::mul(ieee::mul(v[i], scales_[i]), scale);
  }

 private:
  static FLASHQ_HD constexpr int first_value(int run, int odd, int upper) {
    const int low = run / 2, high = run % 2;
    return kLanes == 4 ? 64 * high + 32 * low + 16 * odd + 8 * upper : 32 * low + 16 * odd + 8 * high;
  }

  // What the signs of the format do to the values of each lane.
  using OfLanes = tbq4::Table<uint32_t, kLanes>;
  struct Signs {
    OfLanes flips[kRuns];  // of words of codes: a level's negative is the level of the complemented code
    OfLanes negated;       // a bit for each register at the end
  };
  static FLASHQ_HD constexpr Signs signs_of_lanes() {
    Signs signs{};
    for (int lane = 0; lane < kLanes; ++lane) {
      const int odd = lane & 1, upper = lane >> 1, order = 2 * odd + upper;  // register w holds word w ^ order
      for (int r = 0; r < kValues; ++r) {
        const int value = lane * kValues + (r ^ order * 8);
        signs.flips[r / 8].value[lane] |= (tbq4::sign_bit<tbq4::Sign::kOut>(value) >> 31) * (15u << (4 * (r % 8)));
        const int result = first_value(r / kRun, odd, upper) + r % kRun;
        signs.negated.value[lane] |= tbq4::sign_bit<tbq4::Sign::kIn>(result) >> 31 << r;
      }
    }
    return signs;
  }
  // Selected among constants: cheaper than worked out, and than waiting for memory.
  __device__ __forceinline__ uint32_t of_lane(const OfLanes& constants) const {
    const uint32_t low = odd_ ? constants[1] : constants[0];
    if constexpr (kLanes == 2) return low;
    const uint32_t high = odd_ ? constants[kLanes - 1] : constants[kLanes - 2];
    return upper_ ? high : low;
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

  int odd_, upper_;  // bits of the lane's place in its block
  float odd_sign_, upper_sign_;
  uint32_t flips_[kRuns];
  float scales_[kValues];
};

}  // namespace flashq::cuda
