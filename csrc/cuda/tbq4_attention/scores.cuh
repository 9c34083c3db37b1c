// Products of codes and queries, and what scores need beside: the cap, and the rest that fp16 operands lose.
#pragma once
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
// The score in base 2 of a product that the rule's factor is already part of.
__device__ __forceinline__ float finish_score(const ScoreRule& rule, float x) {
  if (rule.capped) x = precise_tanh(x * rule.shrink) * rule.gain;
  return x * rule.last;
}

// length(q) * norm(k) * scale from which on fp16 queries are too coarse, 2 sqrt(D): their scores are off by 4.5e-4
// there (standard deviation); and from which on fp16 levels are, whose scores are off by 4e-6 of that (D 128).
template <int D> inline constexpr float kReachOfQuery = D == 64 ? 16 : D == 128 ? 22.627417f : 32;
inline constexpr float kReachOfLevels = 300;

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
  __device__ __forceinline__ void rest(uint32_t rest, int i, uint32_t (&a)[4]) const {
#pragma unroll
    for (int k = 0; k < 2; ++k)
#pragma unroll
      for (int h = 0; h < 2; ++h) a[2 * k + h] = expand_rest(rest, row[h].value[i / 2], i % 2 * 2 + k);
  }
};

// Adds to the products of a tile what rounding the levels to fp16 has left out. Rare.
template <int D, int kTiles> __device__ __forceinline__ void add_level_rests(
    const unsigned char* shared, uint32_t lane_at, uint32_t lane4, const Queries<D, kTiles>& q,
    float (&s)[CodeTile<D>::kProducts][kTiles][4]) {
  using Tile = CodeTile<D>;
  const uint32_t rest = table_rest(static_cast<int>(lane4) / 4 % tbq4::kLevels);
#pragma unroll
  for (int j = 0; j < Tile::kProducts; ++j) {
    KeyCodes<D> codes;
    codes.read(shared, lane_at, j);
    const int block = Tile::kBlocks == 2 ? j : 0;
    float sum[kTiles][4] = {};
#pragma unroll
    for (int i = 0; i < Tile::kSteps; ++i) {
      uint32_t a[4];
      codes.rest(rest, i, a);
#pragma unroll
      for (int n = 0; n < kTiles; ++n)
        ptx::mma_16x8x16<Float16>(sum[n], a, q.word[n][block][2 * i], q.word[n][block][2 * i + 1]);
    }
#pragma unroll
    for (int i = 0; i < kTiles * 4; ++i) s[j][i / 4][i % 4] += sum[i / 4][i % 4];
  }
}

}  // namespace flashq::cuda
