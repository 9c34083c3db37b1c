// Scores of a tile to weights: p = 2^(score - base) for the sum of a row, and p * norm_v in fp16 for its output.
//
// One base serves both. It is raised, and everything so far shrunk, when p * norm_v would leave fp16 or p fp32, so the
// largest product of a row, not the largest norm of a tile, decides what fp16 resolves.
#pragma once
#include "cuda/tbq4_attention/results.cuh"
#include "cuda/tbq4_attention/tile.cuh"

namespace flashq::cuda {

inline constexpr float kMostWeight = 0x1p15f, kMostPower = 0x1p60f;
inline constexpr float kFreshWeight = 7;  // log2 of the largest weight after its row's base is raised: room for 2^8

// D: of the tile. Scores [j][n][2 h + c] are of token 2 j + h of the lane's and of row 8 n + 2 t + c; they are divided
// by factor[n][c]. Bit (token * kTiles + n) * 2 + c of `hidden`: the row does not read the token. norm: of the lane's
// tokens and their blocks.
template <int D, int kTiles> struct TileWeights {
  using Tile = CodeTile<D>;
  static constexpr int kTokens = Tile::kPerLane, kNorms = kTokens * Tile::kBlocks;
  using Scores = float[Tile::kGroups][kTiles][4];

  uint32_t packed[Tile::kProducts][kTiles][2];  // by h, two rows each: not transposed yet
  float sum[kTiles][2];                         // of the powers

  // Whether a base has to be raised.
  __device__ __forceinline__ bool compute(const Scores& x, const float (&factor)[kTiles][2],
                                          const float (&norm)[kNorms], uint32_t hidden,
                                          const LaneStates<kTiles>& state) {
    float top = 0;
#pragma unroll
    for (int n = 0; n < kTiles; ++n)
#pragma unroll
      for (int c = 0; c < 2; ++c) sum[n][c] = 0;
#pragma unroll
    for (int j = 0; j < Tile::kGroups; ++j)
#pragma unroll
      for (int n = 0; n < kTiles; ++n)
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const int token = 2 * j + h;
          float power[2], weight[Tile::kBlocks][2];
#pragma unroll
          for (int c = 0; c < 2; ++c) {
            power[c] = ptx::exp2_approx(fmaf(x[j][n][2 * h + c], factor[n][c], -state.base[n][c]));
#pragma unroll
            for (int b = 0; b < Tile::kBlocks; ++b) weight[b][c] = power[c] * norm[token * Tile::kBlocks + b];
          }
          if (hidden) {
#pragma unroll
            for (int c = 0; c < 2; ++c)
              if (hidden >> ((token * kTiles + n) * 2 + c) & 1) {
                power[c] = 0;
#pragma unroll
                for (int b = 0; b < Tile::kBlocks; ++b) weight[b][c] = 0;
              }
          }
#pragma unroll
          for (int c = 0; c < 2; ++c) {
            sum[n][c] += power[c];
#pragma unroll
            for (int b = 0; b < Tile::kBlocks; ++b) top = fmaxf(top, fabsf(weight[b][c]));
          }
#pragma unroll
          for (int b = 0; b < Tile::kBlocks; ++b)
            packed[Tile::kBlocks == 2 ? b : j][n][h] = ptx::pack<Float16>(weight[b][0], weight[b][1]);
        }
    bool raise = top > kMostWeight;
#pragma unroll
    for (int n = 0; n < kTiles; ++n) raise |= fmaxf(sum[n][0], sum[n][1]) > kMostPower;
    return raise;
  }

  template <int kAcc>
  static __device__ __forceinline__ void raise_bases(const Scores& x, const float (&factor)[kTiles][2],
                                                     const float (&norm)[kNorms], uint32_t hidden,
                                                     LaneStates<kTiles>& state, float (&acc)[kTiles][kAcc][4]) {
    float size[kTokens];  // log2 of the norm, of one that fp16 has and that is not 0
#pragma unroll
    for (int i = 0; i < kTokens; ++i) {
      float largest = 0x1p-24f;
#pragma unroll
      for (int b = 0; b < Tile::kBlocks; ++b) largest = fmaxf(largest, fabsf(norm[i * Tile::kBlocks + b]));
      size[i] = __log2f(fminf(largest, tbq4::kHalfMax));
    }
#pragma unroll
    for (int n = 0; n < kTiles; ++n)
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        float high = -kInf;
#pragma unroll
        for (int i = 0; i < kTokens; ++i) {
          const float reach = fmaf(x[i / 2][n][i % 2 * 2 + c], factor[n][c], size[i]);
          if (!(hidden >> ((i * kTiles + n) * 2 + c) & 1)) high = fmaxf(high, reach);
        }
#pragma unroll
        for (int step = 4; step < 32; step *= 2) high = fmaxf(high, __shfl_xor_sync(~0u, high, step));
        const float base = floorf(high) - kFreshWeight;
        if (base > state.base[n][c]) state.move_base(n, c, base, acc[n]);
      }
  }
};

}  // namespace flashq::cuda
