// What page offsets add to scores: the product of the raw query and the page's fp16 offset, both exact.
#pragma once
#include "cuda/tbq4_attention/queries.cuh"

namespace flashq::cuda {

__device__ __forceinline__ const uint16_t* offset_of_page(const CodeParams& p, int64_t page, int kv_head) {
  return p.call.kv.k_offsets + page * p.call.kv.k_offsets_stride[0] + kv_head * p.call.kv.k_offsets_stride[1];
}

// Eight values, zeros where there are none.
__device__ __forceinline__ Vector<uint32_t, 4> load_eight(const uint16_t* from, bool there, bool wide) {
  Vector<uint32_t, 4> x{};
  if (!there) return x;
  if (wide) return load<Vector<uint32_t, 4>>(from);
#pragma unroll
  for (int i = 0; i < 4; ++i) x.value[i] = from[2 * i] | uint32_t{from[2 * i + 1]} << 16;
  return x;
}

// Eight values each, in loads that do not wait for one another.
template <int kCount> __device__ __forceinline__ void load_eights(const uint16_t* const (&from)[kCount], bool wide,
                                                                  Vector<uint32_t, 4> (&x)[kCount]) {
  if (wide) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) x[i] = load<Vector<uint32_t, 4>>(from[i]);
  } else {
#pragma unroll
    for (int i = 0; i < kCount; ++i) x[i] = load_eight(from[i], true, false);
  }
}

// For 16 pages: page[h] is page g + 8 h, or -1, and s[n][2 h + c] what it adds to the scores of row 8 n + 2 t + c. A
// page's sums do not depend on its place. All lanes of a warp.
template <int D, int kTiles> __device__ __forceinline__ void score_pages(const CodeParams& p, const Segment& segment,
                                                                         const ItemRows& item, const int (&page)[2],
                                                                         float (&s)[kTiles][4]) {
  using Tile = CodeTile<D>;
  constexpr int kWords = Tile::kWidth / 8;  // of a lane and block
  const int lane = ptx::fresh_lane(), g = lane / 4, t = lane % 4;
  if (!__any_sync(~0u, page[0] >= 0 || page[1] >= 0)) {  // else there is a page 0, which the others may read
#pragma unroll
    for (int i = 0; i < kTiles * 4; ++i) s[i / 4][i % 4] = 0;
    return;
  }
  uint32_t q[kTiles][Tile::kBlocks][kWords];
  float unit[kTiles];  // of row 8 n + g
#pragma unroll
  for (int n = 0; n < kTiles; ++n) {
#pragma unroll
    for (int b = 0; b < Tile::kBlocks; ++b) load_query<D>(p, segment, item, 8 * n + g, b, q[n][b]);
    with_type(p.call.query.dtype, [&](auto type) {
      using T = decltype(type);
      const auto value = [](uint32_t pair, int i) { return T::load(static_cast<uint16_t>(pair >> (16 * i))); };
      float top = 0;
#pragma unroll
      for (int w = 0; w < Tile::kBlocks * kWords; ++w) {
        const uint32_t pair = q[n][w / kWords][w % kWords];
        top = fmaxf(top, fmaxf(fabsf(value(pair, 0)), fabsf(value(pair, 1))));
      }
#pragma unroll
      for (int step = 1; step < 4; step *= 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, step));
      const FloatUnit raw(top);
      unit[n] = raw.unit * p.rule.factor;
#pragma unroll
      for (int w = 0; w < Tile::kBlocks * kWords; ++w) {
        uint32_t& pair = q[n][w / kWords][w % kWords];
        pair = ptx::pack<Float16>(value(pair, 0) * raw.inverse, value(pair, 1) * raw.inverse);
      }
    });
  }
  float sum[2][kTiles][4] = {};
#pragma unroll
  for (int b = 0; b < Tile::kBlocks; ++b)
#pragma unroll
    for (int i = 0; i < kWords; i += 8) {
      const uint16_t* from[4];
      Vector<uint32_t, 4> x[4];
#pragma unroll
      for (int k = 0; k < 4; ++k)
        from[k] = offset_of_page(p, max_of(page[k % 2], 0), item.kv_head) + b * Tile::kWidth + t * (Tile::kWidth / 4) +
                  (i + k / 2 * 4) * 2;
      load_eights(from, p.wide_offsets, x);
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        const auto pair = [&](int h, int w) { return page[h] >= 0 ? x[k / 2 * 2 + h].value[k % 2 * 2 + w] : 0; };
        const uint32_t a[4] = {pair(0, 0), pair(1, 0), pair(0, 1), pair(1, 1)};
#pragma unroll
        for (int n = 0; n < kTiles; ++n)
          ptx::mma_16x8x16<Float16>(sum[k % 2][n], a, q[n][b][i + 2 * k], q[n][b][i + 2 * k + 1]);
      }
    }
#pragma unroll
  for (int n = 0; n < kTiles; ++n) {
    const float units[2] = {__shfl_sync(~0u, unit[n], 8 * t), __shfl_sync(~0u, unit[n], 8 * t + 4)};
#pragma unroll
    for (int k = 0; k < 4; ++k) s[n][k] = (sum[0][n][k] + sum[1][n][k]) * units[k % 2];
  }
}

}  // namespace flashq::cuda
