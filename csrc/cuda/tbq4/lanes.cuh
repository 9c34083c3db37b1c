// The TBQ4 codec with a block shared among neighbouring lanes of a warp: kValues consecutive values each.
//
// Stages of the transform and of the sum that stay within a lane are core's; the others are shuffles. All lanes of a
// warp take part in every function, whether their block is real or not.
#pragma once
#include "core/half.h"
#include "core/tbq4/codec.h"

namespace flashq::cuda {

inline constexpr unsigned kWholeWarp = ~0u;

// The format's tables where a lane can index them; a local copy would be stored to memory first.
__constant__ constexpr tbq4::SignMask kDeviceSigns[2] = {tbq4::kSignIn, tbq4::kSignOut};
__constant__ constexpr tbq4::Table<float, tbq4::kLevels> kDeviceCentroids[2] = {tbq4::kCentroids64,
                                                                                tbq4::kCentroids128};

template <int kWidth> class BlockLanes {
 public:
  static constexpr int kThreads = 128;  // of the kernels that call for_each_block
  static constexpr int kValues = 8;     // a lane's: one 16-byte load of 16-bit values, one 4-byte store of codes
  static constexpr int kLanes = kWidth / kValues;
  static constexpr int kBlocks = kThreads / kLanes;  // at a time
  static_assert(kLanes <= 32);

  __device__ __forceinline__ BlockLanes() : lane_(static_cast<int>(threadIdx.x) % kLanes) {
    in_ = signs<tbq4::Sign::kIn>();
    out_ = signs<tbq4::Sign::kOut>();
    level_ = kDeviceCentroids[kWidth / 128][static_cast<int>(threadIdx.x) % tbq4::kLevels];
  }

  __device__ __forceinline__ int lane() const { return lane_; }

  // Calls function(block) with this lane's blocks, one after the other; all lanes as often, so numbers from `blocks` on
  // are no blocks.
  template <class Function> static __device__ __forceinline__ void for_each_block(int64_t blocks,
                                                                                  const Function& function) {
    for (int64_t first = int64_t{blockIdx.x} * kBlocks; first < blocks; first += int64_t{gridDim.x} * kBlocks)
      function(first + static_cast<int>(threadIdx.x) / kLanes);
  }
  // The grid that for_each_block is made for.
  static unsigned grid_of(int64_t blocks) {
    return static_cast<unsigned>(min_of<int64_t>(ceil_div(blocks, kBlocks), INT32_MAX));
  }

  template <tbq4::Sign kSign> __device__ __forceinline__ void flip(float (&v)[kValues]) const {
    const uint32_t bits = kSign == tbq4::Sign::kIn ? in_ : out_;
#pragma unroll
    for (int i = 0; i < kValues; ++i) v[i] = tbq4::flip(v[i], bits << (31 - i) & 0x80000000);
  }

  __device__ __forceinline__ void hadamard(float (&v)[kValues]) const {
    tbq4::hadamard<kValues>(v);
#pragma unroll
    for (int step = 1; step < kLanes; step *= 2) {
      const float sign = lane_ & step ? -1.f : 1.f;
#pragma unroll
      for (int i = 0; i < kValues; ++i) {
        // sign * v is exact, so this rounds once: the lower lane's sum, the upper lane's difference.
        v[i] = __fmaf_rn(sign, v[i], __shfl_xor_sync(kWholeWarp, v[i], step));
      }
    }
  }

  // The energy of the block, the same bits in each of its lanes: additions commute.
  __device__ __forceinline__ float energy(const float (&x)[kValues]) const {
    float sum = tbq4::energy_of<kValues>(x);
#pragma unroll
    for (int step = 1; step < kLanes; step *= 2) sum = ieee::add(sum, __shfl_xor_sync(kWholeWarp, sum, step));
    return sum;
  }

  // What a block of kWidth values becomes: this lane's eight codes, and the norm's bits, known to every lane.
  struct Encoded {
    uint32_t codes;
    uint16_t norm;
  };

  // x is destroyed.
  __device__ __forceinline__ Encoded encode(float (&x)[kValues]) const {
    const float squares = energy(x);
    const float length = ieee::sqrt(squares);
    flip<tbq4::Sign::kIn>(x);
    hadamard(x);
    flip<tbq4::Sign::kOut>(x);

    const auto edges = tbq4::scaled_edges(length);
    Encoded block{};
    int32_t decoded_energy = 0;
#pragma unroll
    for (int i = 0; i < kValues; ++i) {
      const tbq4::Level level = tbq4::level_of(x[i], edges);
      block.codes |= static_cast<uint32_t>(level.index) << (4 * i);
      decoded_energy += level.square;
    }
#pragma unroll
    for (int step = 1; step < kLanes; step *= 2) decoded_energy += __shfl_xor_sync(kWholeWarp, decoded_energy, step);
    block.norm = tbq4::norm_of<kWidth>(length, decoded_energy);

    if (!tbq4::is_finite(squares)) return {0, tbq4::kPoisonNorm};
    if (length <= tbq4::kTiny) return {tbq4::kZeroCodes * 0x01010101u, 0};
    return block;
  }

  __device__ __forceinline__ void decode(uint32_t codes, uint16_t norm, float (&out)[kValues]) const {
#pragma unroll
    for (int i = 0; i < kValues; ++i) out[i] = __shfl_sync(kWholeWarp, level_, codes >> (4 * i), tbq4::kLevels);
    flip<tbq4::Sign::kOut>(out);
    hadamard(out);
    const float scale = half_to_float(norm);
#pragma unroll
    for (int i = 0; i < kValues; ++i) out[i] = ieee::mul(ieee::mul(out[i], tbq4::kInvSqrtWidth<kWidth>), scale);
    flip<tbq4::Sign::kIn>(out);
  }

  // Queries: s2 * (H (s1 * v) * kWidth^-0.5). Its inverse swaps the signs.
  template <bool kInverse> __device__ __forceinline__ void rotate(float (&v)[kValues]) const {
    flip<kInverse ? tbq4::Sign::kOut : tbq4::Sign::kIn>(v);
    hadamard(v);
#pragma unroll
    for (int i = 0; i < kValues; ++i) v[i] = ieee::mul(v[i], tbq4::kInvSqrtWidth<kWidth>);
    flip<kInverse ? tbq4::Sign::kIn : tbq4::Sign::kOut>(v);
  }

 private:
  // Bits of this lane's values in a sign vector.
  template <tbq4::Sign kSign> __device__ __forceinline__ uint32_t signs() const {
    const int first = lane_ * kValues;
    const uint32_t word = kDeviceSigns[kSign == tbq4::Sign::kIn ? 0 : 1][first / 32];
    return word >> (first % 32);
  }

  int lane_;
  uint32_t in_, out_;
  float level_;  // one level of the table, so that a shuffle is a look-up
};

}  // namespace flashq::cuda
