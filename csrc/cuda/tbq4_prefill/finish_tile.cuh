// From accumulators to out and lse, or to a split's partial result: rows are rotated back in registers.
#pragma once
#include "cuda/decode/finish.cuh"
#include "cuda/prefill_sm90/softmax.cuh"
#include "cuda/ptx/fresh_thread.cuh"
#include "cuda/tbq4/lanes.cuh"
#include "cuda/tbq4_prefill/traits.cuh"

namespace flashq::cuda::tbq4_sm90 {

// Of two rows, h = 0 and 1: what exponents of 2 are taken against, and this thread's part of their sum. As low as that,
// a base is below all scores, and a score of -inf still weighs 0.
struct RowState { float base[2], sum[2]; };
inline constexpr float kLowestBase = -0x1p126f;

// tbq4's inverse rotation, without its factor, of rows in accumulators: a quad of lanes shares a row, lane t has
// columns 8 j + 2 t + e.
template <int kDim>
__device__ __forceinline__ void rotate_back(float (&o)[kDim / 2]) {
  constexpr int kWidth = tbq4::block_width(kDim), kSteps = kWidth / 8;
  const int t = ptx::fresh_thread() % 4;
  const auto flip = [&](const tbq4::SignMask& mask) {
#pragma unroll
    for (int j = 0; j < kDim / 8; ++j) {
      const uint32_t word = mask.value[j % kSteps / 4] >> 2 * t;
#pragma unroll
      for (int e = 0; e < 2; ++e)
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          float& x = o[4 * j + 2 * h + e];
          x = float_of(bits_of(x) ^ (word << (31 - (j % 4 * 8 + e)) & 0x80000000));
        }
    }
  };
  constexpr auto kOut = tbq4::kSignOut, kIn = tbq4::kSignIn;
  flip(kOut);
#pragma unroll
  for (int i = 0; i < kDim / 2; i += 2) {  // neighbouring columns
    const float a = o[i], b = o[i + 1];
    o[i] = a + b;
    o[i + 1] = a - b;
  }
#pragma unroll
  for (int lanes = 1; lanes < 4; lanes *= 2) {
    const float sign = t & lanes ? -1.f : 1.f;
#pragma unroll
    for (float& x : o) x = fmaf(sign, x, __shfl_xor_sync(~0u, x, lanes));
  }
#pragma unroll
  for (int half = 1; half < kSteps; half *= 2)
#pragma unroll
    for (int j = 0; j < kDim / 8; ++j) {
      if (j & half) continue;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float a = o[4 * j + i], b = o[4 * (j + half) + i];
        o[4 * j + i] = a + b;
        o[4 * (j + half) + i] = a - b;
      }
    }
  flip(kIn);
}

// By a consumer warpgroup, its rows from `row0` on. found_all: all keys that some row sees were there.
template <class C>
__device__ __forceinline__ void finish_tile(const Params& p, const Tile& tile, int row0, bool found_all,
                                            float (&o)[C::kDim / 2], const RowState& rows) {
  rotate_back<C::kDim>(o);
  const int thread = ptx::fresh_thread(), pack_log2 = p.schedule.pack_log2;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    float sum = rows.sum[h];
    sum += __shfl_xor_sync(~0u, sum, 1);
    sum += __shfl_xor_sync(~0u, sum, 2);
    const int row = row0 + sm90::row_of_thread(thread) + 8 * h, query = row >> pack_log2;
    if (query >= tile.q_len) continue;
    const int head = (tile.head << pack_log2) + row - (query << pack_log2);
    const Keys keys = sm90::visible_keys(p.schedule, tile, query);
    const bool sees = max(keys.begin, tile.first * C::kTileK) < min(keys.end, tile.end * C::kTileK);
    const bool sinks = tile.kv_len >= 0 && tile.split == 0;
    const SoftmaxState<Binary> state{sum == 0 ? -kInf : rows.base[h], sum};
    const FinishedRow done =
        cuda::finish_row(state, sinks ? sink_of(p.call.score, head) : -kInf, sees && (found_all || sum != 0));
    const float scale = done.scale * tbq4::kInvSqrtWidth<C::kWidth>;
    const QueryView& q = p.call.query;
    const int64_t own = row_of(p, tile, query, head);
    const bool split = p.schedule.splits > 1;
    const int64_t partial = tile.split * (q.total_tokens * q.q_heads) + own;
    if (thread % 4 == 0)
      *(split ? p.partial_lse + partial : q.lse + lse_offset(q, tile.batch, tile.q_begin + query, head)) = done.lse;
    const auto store_row = [&](const auto& store_pair) {
#pragma unroll
      for (int j = 0; j < C::kDim / 8; ++j)
        store_pair(8 * j + thread % 4 * 2, done.zero ? 0 : o[4 * j + 2 * h] * scale,
                   done.zero ? 0 : o[4 * j + 2 * h + 1] * scale);
    };
    if (split || q.out_dtype == Dtype::kFloat32) {
      float* out = split ? p.partial_out + partial * C::kDim
                         : static_cast<float*>(q.out) + out_offset(q, tile.batch, tile.q_begin + query, head);
      store_row([&](int column, float a, float b) { store(out + column, float2{a, b}); });
    } else {
      auto* out = static_cast<uint16_t*>(q.out) + out_offset(q, tile.batch, tile.q_begin + query, head);
      const bool half = q.out_dtype == Dtype::kFloat16;
      store_row([&](int column, float a, float b) {
        store(out + column, half ? ptx::pack<Float16>(a, b) : ptx::pack<Bfloat16>(a, b));
      });
    }
  }
}

}  // namespace flashq::cuda::tbq4_sm90
