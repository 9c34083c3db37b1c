// Queries as right operands: rotated, scaled to fp16 by a power of two for each row.
//
// A lane (g, t) has dims 32 t .. 32 t + 31 of every block of row g (16 t .. of width 64): step i of a product takes its
// dims 4 i .. 4 i + 3, which are what its bytes of a token's codes are. The rotation needs no other layout: bits 0, 1,
// 5 and 6 of the dim are transformed by products with a 16 x 16 matrix of signs, which are exact, bits 2 to 4 within
// the lane.
#pragma once
#include "cuda/ptx/ldmatrix.cuh"
#include "cuda/tbq4/lanes.cuh"
#include "cuda/tbq4_attention/shared.cuh"

namespace flashq::cuda {

// Where a row of the item lies in q.
__device__ __forceinline__ int64_t query_offset(const QueryView& q, const Divisor& group, const Segment& segment,
                                                const ItemRows& item, int row) {
  const int query = group.quotient(item.first_row + row);
  const int head = item.first_row + row - query * static_cast<int>(group.value);
  return segment.sequence.batch * q.q_stride[0] + (segment.sequence.q_begin + query) * q.q_stride[1] +
         (item.kv_head * group.value + head) * q.q_stride[2];
}

// Pairs of neighbouring values of row `row`, this lane's dims of block b, in 16 bit; zeros past the item's last row.
template <int D> __device__ __forceinline__ void load_query(const CodeParams& p, const Segment& segment,
                                                            const ItemRows& item, int row, int b,
                                                            uint32_t (&words)[CodeTile<D>::kWidth / 8]) {
  constexpr int kWidth = CodeTile<D>::kWidth, kWords = kWidth / 8;
  const bool real = row < item.rows;
  const auto* from = static_cast<const uint16_t*>(p.call.query.q) +
                     query_offset(p.call.query, p.split.group, segment, item, real ? row : 0) + b * kWidth +
                     ptx::fresh_lane() % 4 * (kWidth / 4);
  if (p.wide_q) {
#pragma unroll
    for (int i = 0; i < kWords; i += 4) {
      const auto four = load<Vector<uint32_t, 4>>(from + 2 * i);
#pragma unroll
      for (int j = 0; j < 4; ++j) words[i + j] = real ? four.value[j] : 0;
    }
  } else {
#pragma unroll
    for (int i = 0; i < kWords; ++i) words[i] = real ? from[2 * i] | uint32_t{from[2 * i + 1]} << 16 : 0;
  }
}
template <class Body> __device__ __forceinline__ void with_type(Dtype dtype, Body body) {
  if (dtype == Dtype::kFloat16)
    body(Float16{});
  else
    body(Bfloat16{});
}

// The largest magnitude becomes 2^10 to 2^11, so that both fp16 parts keep 11 bits of values 2^-14 times as large.
// Infinite and NaN values stay what they are.
struct FloatUnit {
  float inverse, unit;  // powers of two

  __device__ __forceinline__ explicit FloatUnit(float top) {
    constexpr int kTop = 10, kLeast = kTop - 126;  // exponents
    const int exponent = min_of(max_of(static_cast<int>(bits_of(top) >> 23) - 127, kLeast), 127) - kTop;
    unit = float_of(static_cast<uint32_t>(exponent + 127) << 23);
    inverse = float_of(static_cast<uint32_t>(127 - exponent) << 23);
  }
};

// The sign bits of a sign vector at this lane's dims of a block, and those of its pair w as of two 16-bit values.
template <int kWidth> __device__ __forceinline__ uint32_t lane_signs(tbq4::Sign sign) {
  const uint32_t t = static_cast<uint32_t>(ptx::fresh_lane()) % 4;
  const auto& words = kDeviceSigns[sign == tbq4::Sign::kIn ? 0 : 1];
  return kWidth == 128 ? words[static_cast<int>(t)] : words[static_cast<int>(t / 2)] >> (t % 2 * 16);
}
__device__ __forceinline__ uint32_t pair_signs(uint32_t bits, int w) {
  const uint32_t low = 2 * w <= 15 ? bits << (15 - 2 * w) : bits >> (2 * w - 15), high = bits << (30 - 2 * w);
  return (low & 0x8000) | (high & 0x80000000);
}

// The rows of a warp's item.
template <int D, int kTiles> struct Queries {
  using Tile = CodeTile<D>;
  static constexpr int kWords = Tile::kSteps * 2;  // of a block
  uint32_t word[kTiles][Tile::kBlocks][kWords];    // right operands: two of each step
  float factor[kTiles][2];                         // of the products of rows 8 n + 2 t + c
  float reach;                                     // largest length of a query times the scale

  // What rounding leaves goes to `rest`, for this warp.
  __device__ __forceinline__ void prepare(const CodeParams& p, const Segment& segment, const ItemRows& item,
                                          unsigned char* rest) {
    const uint32_t lane = static_cast<uint32_t>(ptx::fresh_lane()), g = lane / 4, t = lane % 4;
    const uint32_t odd = (g & 2 * t) >> 1 ^ (g & 2 * t) >> 2, signs = (odd & 1) << 15 | ((odd ^ g) & 1) << 31;
    const uint32_t in = lane_signs<Tile::kWidth>(tbq4::Sign::kIn), out = lane_signs<Tile::kWidth>(tbq4::Sign::kOut);
    float longest = 0;
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
      float x[Tile::kBlocks][Tile::kSteps][4] = {};
#pragma unroll
      for (int b = 0; b < Tile::kBlocks; ++b) {
        uint32_t raw[kWords];
        load_query<D>(p, segment, item, 8 * n + static_cast<int>(g), b, raw);
#pragma unroll
        for (int w = 0; w < kWords; ++w) raw[w] ^= pair_signs(in, w);
        with_type(p.call.query.dtype, [&](auto type) {
          using T = decltype(type);
          const uint32_t same = signs ^ (uint32_t{T::store(1)} * 0x10001), negated = same ^ 0x80008000;
          const uint32_t a[4] = {same, same, same, negated};
#pragma unroll
          for (int i = 0; i < Tile::kSteps; ++i) ptx::mma_16x8x16<T>(x[b][i], a, raw[2 * i], raw[2 * i + 1]);
        });
#pragma unroll
        for (int step = 1; step < Tile::kSteps; step *= 2)
#pragma unroll
          for (int i = 0; i < Tile::kSteps; ++i) {
            if (i & step) continue;
#pragma unroll
            for (int k = 0; k < 4; ++k) {
              const float low = x[b][i][k], high = x[b][i + step][k];
              x[b][i][k] = low + high;
              x[b][i + step][k] = low - high;
            }
          }
      }
      float inverse[2];
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        float top = 0, squares = 0;
#pragma unroll
        for (int i = 0; i < Tile::kBlocks * Tile::kSteps * 2; ++i)
          top = fmaxf(top, fabsf(x[i / 2 / Tile::kSteps][i / 2 % Tile::kSteps][i % 2 * 2 + c]));
#pragma unroll
        for (int step = 4; step < 32; step *= 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, step));
        const FloatUnit scaled(top * tbq4::kInvSqrtWidth<Tile::kWidth>);
        inverse[c] = scaled.inverse * tbq4::kInvSqrtWidth<Tile::kWidth>;
#pragma unroll
        for (int i = 0; i < Tile::kBlocks * Tile::kSteps * 2; ++i) {
          float& y = x[i / 2 / Tile::kSteps][i / 2 % Tile::kSteps][i % 2 * 2 + c];
          y *= inverse[c];
          squares = fmaf(y, y, squares);
        }
#pragma unroll
        for (int step = 4; step < 32; step *= 2) squares += __shfl_xor_sync(~0u, squares, step);
        factor[n][c] = scaled.unit * p.rule.factor * kLevelUnit<Tile::kWidth>;
        const float length = sqrtf(squares) * (scaled.unit * fabsf(p.call.score.scale));
        longest = longest >= length || longest != longest ? longest : length;  // a NaN stays
      }
#pragma unroll
      for (int b = 0; b < Tile::kBlocks; ++b) {
        uint32_t left[kWords];
#pragma unroll
        for (int w = 0; w < kWords; ++w) {
          const float even = x[b][w / 2][w % 2 * 2], odd_one = x[b][w / 2][w % 2 * 2 + 1];
          const uint32_t high = ptx::pack<Float16>(even, odd_one), flips = pair_signs(out, w);
          left[w] = ptx::transpose_8x8(ptx::pack<Float16>(even - half_to_float(static_cast<uint16_t>(high)),
                                                          odd_one - half_to_float(static_cast<uint16_t>(high >> 16)))) ^
                    flips;
          word[n][b][w] = ptx::transpose_8x8(high) ^ flips;
        }
#pragma unroll
        for (int w = 0; w < kWords; w += 4)
          store(rest + rest_at<D>((n * Tile::kBlocks + b) * kWords + w),
                Vector<uint32_t, 4>{left[w], left[w + 1], left[w + 2], left[w + 3]});
      }
    }
#pragma unroll
    for (int step = 1; step < 4; step *= 2) {
      const float other = __shfl_xor_sync(~0u, longest, step);
      longest = longest >= other || longest != longest ? longest : other;
    }
    reach = longest;
  }
  // The rests of the two words of step i.
  static __device__ __forceinline__ Vector<uint32_t, 2> rest_of(const unsigned char* rest, int n, int b, int i) {
    return load<Vector<uint32_t, 2>>(rest + rest_at<D>(((n * Tile::kBlocks + b) * kWords + 2 * i) & ~3) + i % 2 * 8);
  }
};

}  // namespace flashq::cuda
