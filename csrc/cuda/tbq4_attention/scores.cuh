// What scores need beside the plain product: the cap, the rest that fp16 operands lose, and page offsets.
#pragma once
#include "cuda/tbq4_attention/code_stream.cuh"
#include "cuda/tbq4_attention/queries.cuh"

namespace flashq::cuda {

// Off by 3e-7 relative. The hardware's tanh, off by 5e-4, would use up the tolerance.
__device__ __forceinline__ float precise_tanh(float x) {
  const float square = x * x;
  if (fabsf(x) < 0.3f)
    return x * fmaf(square, fmaf(square, fmaf(square, fmaf(square, 62.f / 2835, -17.f / 315), 2.f / 15), -1.f / 3), 1);
  const float e = ptx::exp2_approx(fabsf(x) * (-2 * kLog2E));
  return copysignf(__fdividef(1 - e, 1 + e), x);
}
// ScoreRule::score of a product that the factor is already part of.
__device__ __forceinline__ float finish_score(const ScoreRule& rule, float x) {
  if (rule.capped) x = precise_tanh(x * rule.shrink) * rule.gain;
  return x * rule.last;
}

// length(q) * norm(k) * scale from which on fp16 queries are too coarse, and from which on fp16 levels are: their
// scores are off by 2e-5 and by 4e-6 of that (standard deviation, D 128).
inline constexpr float kReachOfQuery = 40, kReachOfLevels = 300;

// Rows g and g + 8 of K of product j: 16 bytes of codes (8 of D 64).
template <int D> struct KeyCodes {
  using Tile = CodeTile<D>;
  Vector<uint32_t, Tile::kWords> row[2];

  __device__ __forceinline__ void read(const unsigned char* shared, uint32_t lane_at, int j) {
#pragma unroll
    for (int h = 0; h < 2; ++h)
      row[h] = load<Vector<uint32_t, Tile::kWords>>(shared + (lane_at ^ Tile::within(j, h)) + Tile::above(j, h));
  }
  // The left operand of step i.
  __device__ __forceinline__ void operand(const unsigned char* table, uint32_t lane4, int i, uint32_t (&a)[4]) const {
#pragma unroll
    for (int k = 0; k < 2; ++k)
#pragma unroll
      for (int h = 0; h < 2; ++h) a[2 * k + h] = expand(table, row[h].value[i / 2], lane4, i % 2 * 2 + k);
  }
  __device__ __forceinline__ void rest(const uint32_t* table, int i, uint32_t (&a)[4]) const {
#pragma unroll
    for (int k = 0; k < 2; ++k)
#pragma unroll
      for (int h = 0; h < 2; ++h) a[2 * k + h] = expand_rest(table, row[h].value[i / 2], i % 2 * 2 + k);
  }
};

// Adds to the products of a tile what rounding the queries, and if `levels` the levels, to fp16 has left out. Rare.
template <int D, int kTiles> __device__ __forceinline__ void add_rest(const unsigned char* shared, const SharedPlan& at,
                                                                      uint32_t lane_at, uint32_t lane4, bool levels,
                                                                      float (&s)[CodeTile<D>::kProducts][kTiles][4]) {
  using Tile = CodeTile<D>;
#pragma unroll
  for (int j = 0; j < Tile::kProducts; ++j) {
    KeyCodes<D> codes;
    codes.read(shared, lane_at, j);
    const int block = Tile::kBlocks == 2 ? j : 0;
    float rest[kTiles][4] = {};
#pragma unroll
    for (int i = 0; i < Tile::kSteps; ++i) {
      uint32_t a[4];
      codes.operand(shared, lane4, i, a);
#pragma unroll
      for (int n = 0; n < kTiles; ++n) {
        const auto q = load_fragment<D>(shared + at.rest_query, n, block, i);
        ptx::mma_16x8x16<Float16>(rest[n], a, q.value[0], q.value[1]);
      }
      if (!levels) continue;
      codes.rest(reinterpret_cast<const uint32_t*>(shared + at.rest_table), i, a);
#pragma unroll
      for (int n = 0; n < kTiles; ++n) {
        const auto q = load_fragment<D>(shared + at.query, n, block, i);
        ptx::mma_16x8x16<Float16>(rest[n], a, q.value[0], q.value[1]);
      }
    }
#pragma unroll
    for (int n = 0; n < kTiles; ++n)
#pragma unroll
      for (int c = 0; c < 4; ++c) s[j][n][c] += rest[n][c];
  }
}

// q.offset for the rows g of K: of 16-token groups, tokens of a lane's row share a page. `offset`: where this lane's
// dims of its page start in shared memory.
template <int D, int kTiles> __device__ __forceinline__ void score_offsets(const unsigned char* shared,
                                                                           const SharedPlan& at, uint32_t offset,
                                                                           float (&s)[kTiles][2]) {
  using Tile = CodeTile<D>;
  constexpr int kChunks = Tile::kWidth / 32;  // of 8 dims, of a block
  float sum[2][kTiles][4] = {};
#pragma unroll
  for (int b = 0; b < Tile::kBlocks; ++b)
#pragma unroll
    for (int i = 0; i < kChunks; ++i) {
      const auto x = load<Vector<uint32_t, 4>>(shared + offset + b * Tile::kWidth * 2 + i * 16);
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const uint32_t a[4] = {x.value[2 * j], x.value[2 * j], x.value[2 * j + 1], x.value[2 * j + 1]};
#pragma unroll
        for (int n = 0; n < kTiles; ++n) {
          const auto q = load_fragment<D>(shared + at.raw_query, n, b, 2 * i + j);
          ptx::mma_16x8x16<Float16>(sum[j][n], a, q.value[0], q.value[1]);
        }
      }
    }
#pragma unroll
  for (int n = 0; n < kTiles; ++n)
#pragma unroll
    for (int c = 0; c < 2; ++c) s[n][c] = sum[0][n][c] + sum[1][n][c];
}

// The same, in the same order, for tokens on any pages, straight from memory: `page` of the tokens of rows g and g + 8,
// -1: none.
template <int D, int kTiles> __device__ __forceinline__ void score_scattered_offsets(const CodeParams& p,
                                                                                     const unsigned char* shared,
                                                                                     const SharedPlan& at, int kv_head,
                                                                                     const int64_t (&page)[2],
                                                                                     float (&s)[kTiles][4]) {
  using Tile = CodeTile<D>;
  float sum[2][kTiles][4] = {};
  const int t = static_cast<int>(threadIdx.x) % 4;
#pragma unroll 1
  for (int i = 0; i < Tile::kSteps * Tile::kBlocks; i += 2) {
    const int block = i / Tile::kSteps, step = i % Tile::kSteps;
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const int column = block * Tile::kWidth + t * (Tile::kWidth / 4) + (step + j) * 4;
      uint32_t a[4] = {};
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        if (page[h] < 0) continue;
        const uint16_t* from = offset_of_page(p, page[h], kv_head) + column;
#pragma unroll
        for (int k = 0; k < 2; ++k) a[2 * k + h] = from[2 * k] | uint32_t{from[2 * k + 1]} << 16;
      }
#pragma unroll
      for (int n = 0; n < kTiles; ++n) {
        const auto q = load_fragment<D>(shared + at.raw_query, n, block, step + j);
        ptx::mma_16x8x16<Float16>(sum[j][n], a, q.value[0], q.value[1]);
      }
    }
  }
#pragma unroll
  for (int n = 0; n < kTiles; ++n)
#pragma unroll
    for (int c = 0; c < 4; ++c) s[n][c] = sum[0][n][c] + sum[1][n][c];
}

}  // namespace flashq::cuda
