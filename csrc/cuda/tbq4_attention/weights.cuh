// Scores of a tile to weights: p = 2^(score - base) for the sum of a row, and p * norm_v in fp16 for its output.
//
// One base serves both. It is raised, and everything so far shrunk, when p * norm_v would leave fp16 or p fp32, so the
// largest product of a row, not the largest norm of a tile, decides what fp16 resolves.
#pragma once
#include "cuda/ptx/math.cuh"
#include "cuda/softmax_step.cuh"
#include "cuda/tbq4_attention/tile.cuh"

namespace flashq::cuda {

inline constexpr uint32_t kMostWeight = 0x7800;  // fp16, 2^15
inline constexpr float kMostPower = 0x1p60f;
inline constexpr float kFreshWeight = 7;  // log2 of the largest weight after its row's base is raised: room for 2^8

// A row's state in a lane: weights are relative to 2^base, sums are its own keys' part.
template <int kTiles> struct LaneStates {
  float base[kTiles][2], sum[kTiles][2];  // of rows 8 n + 2 t + c

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int i = 0; i < 2 * kTiles; ++i) {
      base[i / 2][i % 2] = -kInf;
      sum[i / 2][i % 2] = 0;
    }
  }

  // Weights of a row are relative to 2^to from now on, those of the past too: acc[.][c] and [.][2 + c] are its sums.
  template <int kAcc> __device__ __forceinline__ void move_base(int n, int c, float to, float (&acc)[kAcc][4]) {
    const float shrink = ptx::exp2_approx(base[n][c] - to);
    base[n][c] = to;
    sum[n][c] *= shrink;
#pragma unroll
    for (int i = 0; i < kAcc; ++i) {
      acc[i][c] *= shrink;
      acc[i][2 + c] *= shrink;
    }
  }
};

// D: of the tile. Scores [j][n][2 h + c] are of token 2 j + h of the lane's and of row 8 n + 2 t + c: times
// factor[n][c]. Bit (token * kTiles + n) * 2 + c of `hidden`: the row does not read the token. norm: of the lane's
// tokens and their blocks.
template <int D, int kTiles> struct TileWeights {
  using Tile = CodeTile<D>;
  static constexpr int kTokens = Tile::kPerLane, kNorms = kTokens * Tile::kBlocks;
  using Scores = float[Tile::kGroups][kTiles][4];

  uint32_t packed[Tile::kProducts][kTiles][2];  // by h, two rows each: not transposed yet
  float sum[kTiles][2];                         // of the powers

  // Whether a base has to be raised. kHidden: some rows may not read some tokens.
  template <bool kHidden>
  __device__ __forceinline__ bool compute(const Scores& x, const float (&factor)[kTiles][2],
                                          const float (&norm)[kNorms], uint32_t hidden,
                                          const LaneStates<kTiles>& state) {
    float power[Tile::kGroups][kTiles][4];
#pragma unroll
    for (int j = 0; j < Tile::kGroups; ++j)
#pragma unroll
      for (int n = 0; n < kTiles; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          power[j][n][i] = ptx::exp2_approx(fmaf(x[j][n][i], factor[n][i % 2], -state.base[n][i % 2]));
          if (kHidden && (hidden >> (((2 * j + i / 2) * kTiles + n) * 2 + i % 2) & 1)) power[j][n][i] = 0;
        }
#pragma unroll
    for (int n = 0; n < kTiles; ++n)
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        sum[n][c] = power[0][n][c];
#pragma unroll
        for (int i = 1; i < Tile::kGroups * 2; ++i) sum[n][c] += power[i / 2][n][i % 2 * 2 + c];
      }
#pragma unroll
    for (int j = 0; j < Tile::kGroups; ++j)
#pragma unroll
      for (int n = 0; n < kTiles; ++n)
#pragma unroll
        for (int h = 0; h < 2; ++h)
#pragma unroll
          for (int b = 0; b < Tile::kBlocks; ++b) {
            const float size = norm[(2 * j + h) * Tile::kBlocks + b];
            uint32_t& both = packed[Tile::kBlocks == 2 ? b : j][n][h];
            both = ptx::pack<Float16>(power[j][n][2 * h] * size, power[j][n][2 * h + 1] * size);
            if constexpr (kHidden) {  // weights may be NaN where their row does not read the token
              const uint32_t bits = ~hidden >> ((2 * j + h) * kTiles + n) * 2;
              both &= (bits & 1 ? 0xffffu : 0) | (bits & 2 ? 0xffff0000u : 0);
            }
          }
    uint32_t top = packed[0][0][0] & 0x7fff7fff;  // two halves
#pragma unroll
    for (int i = 1; i < Tile::kProducts * kTiles * 2; ++i)
      top = ptx::max_halves(top, packed[i / 2 / kTiles][i / 2 % kTiles][i % 2] & 0x7fff7fff);
    bool raise = ((top + (0x7fff - kMostWeight) * 0x10001) & 0x80008000) != 0;
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
