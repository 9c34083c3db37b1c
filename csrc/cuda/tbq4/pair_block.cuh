// Encoding with a block shared by two lanes. For many blocks at once; lanes.cuh is for few.
//
// What a lane holds: first a half of the block each, in an order of its own: register r of the lower lane is value r of
// its half, of the upper lane value r ^ kRun. The last stage of the transform exchanges half of that, always the upper
// registers; then lane t holds two runs of kRun values, from t * kRun and from (t + 2) * kRun on.
//
// Which values a sign vector negates is then a matter of the register, known to the compiler, and for some registers
// also of the lane. The latter are held without that sign, a factor of +-1 (here: the side), until an operation can
// take it in as a fused multiplication, which is exact.
//
// A block in one thread would save a shuffle for two values. But its loop is 39 KB of code, and an H200 runs loops of
// more than 31 KB at down to half the speed: keys and values of 8192 tokens and 8 heads took 24.8 us, not 19.4.
#pragma once
#include <type_traits>

#include "core/half.h"
#include "core/tbq4/codec.h"
#include "cuda/tbq4/bulk_tables.cuh"
#include "cuda/tbq4/lanes.cuh"

namespace flashq::cuda {

// core's energy_of. A square of an fp16 value is exact in fp32, so a fused addition rounds as the separate one does.
template <class T, int kCount> __device__ __forceinline__ float energy_part(const float* x) {
  if constexpr (std::is_same_v<T, Float16>) {
    float sums[kCount / 2];
#pragma unroll
    for (int i = 0; i < kCount / 2; ++i) sums[i] = __fmaf_rn(x[2 * i], x[2 * i], ieee::mul(x[2 * i + 1], x[2 * i + 1]));
    return tbq4::tree_sum<kCount / 2>(sums);
  } else {
    return tbq4::energy_of<kCount>(x);
  }
}

template <int kWidth> class PairBlock {
 public:
  static constexpr int kLanes = 2, kBlocks = 32 / kLanes;  // of a warp
  static constexpr int kValues = kWidth / 2, kRun = kValues / 2, kWords = kValues / 8;

  __device__ __forceinline__ PairBlock() : upper_(threadIdx.x & 1), side_(upper_ ? -1.f : 1.f) {}

  // Where register r's value lies in the block before the transform, for r a multiple of a piece that divides kRun.
  __device__ __forceinline__ int first_value(int r) const { return upper_ * kValues + (r ^ upper_ * kRun); }
  // Where a run's values lie after it.
  __device__ __forceinline__ int run_start(int run) const { return run * kValues + upper_ * kRun; }

  struct Encoded {
    uint32_t codes[kWords];  // of the first run, then of the second
    uint16_t norm;           // known to both lanes
  };

  // x, whose own energy is `squares`, is destroyed. Table of fill_encoding. All lanes of a warp take part.
  __device__ __forceinline__ Encoded encode(float (&x)[kValues], float squares, const char* table) const {
    squares = ieee::add(squares, __shfl_xor_sync(kWholeWarp, squares, 1));
    const float length = ieee::sqrt(squares);
    transform(x);

    // 8 bytes of a cell for each lane of half a warp, which is what loads of 8 bytes are served in; 4 of an energy.
    const uint32_t cell_offset = threadIdx.x % 16 * 8, energy_offset = kCopyBytes + threadIdx.x % 32 * 4;
    const float cells_a_unit = __fdividef(kCellsPerLength, length), sided_cells = cells_a_unit * side_;
    constexpr Signs out = signs<tbq4::Sign::kOut, false>();
    Encoded block;
    int32_t decoded_energy = 0;
#pragma unroll
    for (int j = 0; j < kWords; ++j) {
      uint32_t word = 0;
#pragma unroll
      for (int i = 7; i >= 0; --i) {
        const int r = 8 * j + i;
        const float v = out.negative[r] ? -x[r] : x[r];
        // 1.5 * 2^23 + n has n, a small integer, in its lowest byte.
        const float number = __fmaf_rn(v, out.sided[r] ? sided_cells : cells_a_unit, 0x1.8p23f + kCellOfZero);
        const Cell cell = *reinterpret_cast<const Cell*>(table + table_offset<0>(bits_of(number), cell_offset));
        const float edge = ieee::mul(cell.edge, length);
        const float distance = out.sided[r] ? __fmaf_rn(v, side_, -edge) : ieee::sub(v, edge);
        word = word * 16 + static_cast<uint32_t>(cell.above + (static_cast<int32_t>(bits_of(distance)) >> 31));
      }
      block.codes[j] = word;
      const auto energy_at = [&](uint32_t offset) { return *reinterpret_cast<const int32_t*>(table + offset); };
      decoded_energy +=
          energy_at(table_offset<0>(word, energy_offset)) + energy_at(table_offset<1>(word, energy_offset));
      decoded_energy +=
          energy_at(table_offset<2>(word, energy_offset)) + energy_at(table_offset<3>(word, energy_offset));
    }
    decoded_energy += __shfl_xor_sync(kWholeWarp, decoded_energy, 1);
    block.norm = tbq4::norm_of<kWidth>(length, decoded_energy);

    const bool poison = !tbq4::is_finite(squares), zero = length <= tbq4::kTiny;
    if (poison || zero) {
#pragma unroll
      for (int j = 0; j < kWords; ++j) block.codes[j] = poison ? 0 : tbq4::kZeroCodes * 0x01010101u;
      block.norm = poison ? tbq4::kPoisonNorm : 0;
    }
    return block;
  }

 private:
  // A register's sign: -1 where `negative`, times the side where `sided`.
  struct Signs { bool negative[kValues], sided[kValues]; };

  // Of a sign vector, before or after the transform.
  template <tbq4::Sign kSign, bool kBefore> static FLASHQ_HD constexpr Signs signs() {
    Signs found{};
    for (int r = 0; r < kValues; ++r) {
      const int lower = kBefore ? r : r / kRun * kValues + r % kRun;
      const int upper = kBefore ? kValues + (r ^ kRun) : lower + kRun;
      found.negative[r] = tbq4::sign_bit<kSign>(lower) != 0;
      found.sided[r] = tbq4::sign_bit<kSign>(lower) != tbq4::sign_bit<kSign>(upper);
    }
    return found;
  }

  // Whether values are held without the side: `sided` before the stage of kHalf, of groups of kHalf registers.
  template <int kHalf> static FLASHQ_HD constexpr Signs signs_before() {
    if constexpr (kHalf == 1) {
      return signs<tbq4::Sign::kIn, true>();
    } else {
      constexpr Signs last = signs_before<kHalf / 2>();
      Signs now{};
      for (int r = 0; r < kValues; ++r) {
        const int base = r / kHalf * kHalf;
        now.sided[r] = last.sided[base] && last.sided[base + kHalf / 2];
      }
      return now;
    }
  }

  // One stage within the lane: a and b are the two values, as they are or without the side.
  template <int kHalf> __device__ __forceinline__ void stage(float (&x)[kValues]) const {
    constexpr Signs before = signs_before<kHalf>();
#pragma unroll
    for (int r = 0; r < kValues; ++r) {
      if (r & kHalf) continue;
      const float a = before.negative[r] ? -x[r] : x[r], b = before.negative[r + kHalf] ? -x[r + kHalf] : x[r + kHalf];
      if (before.sided[r] == before.sided[r + kHalf]) {  // and so are the results
        x[r] = ieee::add(a, b);
        x[r + kHalf] = ieee::sub(a, b);
      } else if (before.sided[r]) {
        x[r] = __fmaf_rn(side_, a, b);
        x[r + kHalf] = __fmaf_rn(side_, a, -b);
      } else {
        x[r] = __fmaf_rn(side_, b, a);
        x[r + kHalf] = __fmaf_rn(-side_, b, a);
      }
    }
    if constexpr (2 * kHalf < kRun) stage<2 * kHalf>(x);
  }

  __device__ __forceinline__ void transform(float (&x)[kValues]) const {
    stage<1>(x);
    // The lane's last stage: the lower lane keeps the sum and sends the difference, the upper lane keeps the difference
    // and sends minus the sum: side * a + b and side * a - b. If b is sided and a is not, these are sided in turn.
    constexpr Signs before = signs_before<kRun>();
    constexpr bool kASided = before.sided[0], kBSided = before.sided[kRun], kSided = !kASided && kBSided;
#pragma unroll
    for (int r = 0; r < kRun; ++r) {
      const float a = x[r], b = x[r + kRun];
      const float kept = kASided == !kBSided ? ieee::add(a, b)
                         : kASided           ? __fmaf_rn(side_, b, a)
                                             : __fmaf_rn(side_, a, b);
      const float sent = kASided == !kBSided ? ieee::sub(a, b)
                         : kASided           ? __fmaf_rn(-side_, b, a)
                                             : __fmaf_rn(side_, a, -b);
      // The stage across the two lanes: the sum, and the difference of the lower lane's value and the upper lane's.
      const float got = __shfl_xor_sync(kWholeWarp, sent, 1);
      x[r] = kSided ? __fmaf_rn(side_, kept, got) : __fmaf_rn(-side_, got, kept);
      x[r + kRun] = kSided ? __fmaf_rn(-side_, got, kept) : __fmaf_rn(side_, kept, got);
    }
  }

  int upper_;   // of the two lanes
  float side_;  // -1 for the upper lane
};

}  // namespace flashq::cuda
