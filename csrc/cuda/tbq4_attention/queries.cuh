// Queries as right operands: rotated, scaled to fp16 by a power of two for each row, in the order of fragments.
//
// A lane (g, t) of product step i has dims 32 t + 4 i .. + 3 of a block (16 t + 4 i of width 64) of row g: what its
// bytes of a token's codes are. Eight dims are one 16-byte load.
#pragma once
#include "cuda/tbq4/rows.cuh"
#include "cuda/tbq4_attention/shared.cuh"

namespace flashq::cuda {

// Which chunk of 16 bytes holds dims 8 chunk .. + 7 of a block of a row.
template <int D> __device__ __forceinline__ int fragment_chunk(int row, int block, int chunk) {
  using Tile = CodeTile<D>;
  constexpr int kPerLane = Tile::kWidth / 32;  // chunks of a lane
  const int lane = row % 8 * 4 + chunk / kPerLane;
  return ((row / 8 * Tile::kBlocks + block) * kPerLane + chunk % kPerLane) * 32 + lane;
}
// The two words of a row tile's step i for this lane.
template <int D> __device__ __forceinline__ Vector<uint32_t, 2> load_fragment(const unsigned char* query, int tile,
                                                                              int block, int i) {
  using Tile = CodeTile<D>;
  constexpr int kPerLane = Tile::kWidth / 32;
  const int chunk = ((tile * Tile::kBlocks + block) * kPerLane + i / 2) * 32 + static_cast<int>(threadIdx.x) % 32;
  return load<Vector<uint32_t, 2>>(query + chunk * 16 + i % 2 * 8);
}

// Where a row of the item lies in q.
__device__ __forceinline__ int64_t query_offset(const QueryView& q, const Divisor& group, const Segment& segment,
                                                const ItemRows& item, int row) {
  const int query = group.quotient(item.first_row + row);
  const int head = item.first_row + row - query * static_cast<int>(group.value);
  return segment.sequence.batch * q.q_stride[0] + (segment.sequence.q_begin + query) * q.q_stride[1] +
         (item.kv_head * group.value + head) * q.q_stride[2];
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

template <int D, int kTiles> __device__ __forceinline__ void prepare_queries(
    const CodeParams& p, const Segment& segment, const ItemRows& item, unsigned char* shared, const SharedPlan& at) {
  using Tile = CodeTile<D>;
  using Lanes = BlockLanes<Tile::kWidth>;
  constexpr int kUnits = 32 / Lanes::kLanes;  // of a warp: blocks of rows
  const Lanes lanes;
  const QueryView& q = p.call.query;
  const int first = static_cast<int>(threadIdx.x) / Lanes::kLanes, step = static_cast<int>(blockDim.x) / 32 * kUnits;
  const auto of_row = [](float x, auto combine) {
#pragma unroll
    for (int i = 1; i < Lanes::kLanes * Tile::kBlocks; i *= 2) x = combine(x, __shfl_xor_sync(~0u, x, i));
    return x;
  };
  const auto larger = [](float a, float b) { return fmaxf(a, b); };
#pragma unroll 1
  for (int unit = first; unit < 8 * kTiles * Tile::kBlocks; unit += step) {
    const int row = unit / Tile::kBlocks, block = unit % Tile::kBlocks;
    float x[8] = {};
    if (row < item.rows) {
      const int64_t from = query_offset(q, p.split.group, segment, item, row) + block * Tile::kWidth + lanes.lane() * 8;
      const auto load_row = [&](auto t) {
        using T = decltype(t);
        const auto* values = static_cast<const uint16_t*>(q.q) + from;
        if (p.wide_q)
          load_values<T, true>(values, x);
        else
          load_values<T, false>(values, x);
      };
      if (q.dtype == Dtype::kFloat16)
        load_row(Float16{});
      else
        load_row(Bfloat16{});
    }
    const int chunk = fragment_chunk<D>(row, block, lanes.lane()) * 16;
    const auto top_of_row = [&] {
      float top = 0;
#pragma unroll
      for (int i = 0; i < 8; ++i) top = fmaxf(top, fabsf(x[i]));
      return of_row(top, larger);
    };
    if (p.call.kv.k_offsets) {
      const FloatUnit raw(top_of_row());
      Vector<uint32_t, 4> words;
#pragma unroll
      for (int i = 0; i < 4; ++i)
        words.value[i] = ptx::pack<Float16>(x[2 * i] * raw.inverse, x[2 * i + 1] * raw.inverse);
      store(shared + at.raw_query + chunk, words);
      if (block == 0 && lanes.lane() == 0)
        reinterpret_cast<float*>(shared + at.offset_scales)[row] = raw.unit * p.rule.factor;
    }
    lanes.template rotate<false>(x);
    const FloatUnit scaled(top_of_row());
    float squares = 0;
    Vector<uint32_t, 4> high, low;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float part[2];
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const float y = x[2 * i + j] * scaled.inverse;
        squares = fmaf(y, y, squares);
        part[j] = y;
      }
      high.value[i] = ptx::pack<Float16>(part[0], part[1]);
#pragma unroll
      for (int j = 0; j < 2; ++j) part[j] -= half_to_float(static_cast<uint16_t>(high.value[i] >> (16 * j)));
      low.value[i] = ptx::pack<Float16>(part[0], part[1]);
    }
    store(shared + at.query + chunk, high);
    store(shared + at.rest_query + chunk, low);
    squares = of_row(squares, [](float a, float b) { return a + b; });
    if (block == 0 && lanes.lane() == 0) {
      reinterpret_cast<float*>(shared + at.scales)[row] = scaled.unit * p.rule.factor * kLevelUnit<Tile::kWidth>;
      // Of nonnegative numbers the bits have the same order; NaN is above all.
      const float reach = sqrtf(squares) * (scaled.unit * fabsf(p.call.score.scale));
      atomicMax(reinterpret_cast<int*>(shared + at.reach), static_cast<int>(bits_of(reach) & 0x7fffffff));
    }
  }
}

}  // namespace flashq::cuda
