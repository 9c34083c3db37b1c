// From a row's state and sums over all its keys to out and lse. Sinks come in here, once.
#pragma once
#include "core/half.h"
#include "cuda/finish_row.cuh"
#include "cuda/ptx/mma.cuh"
#include "cuda/vector.cuh"
#include "params.h"

namespace flashq::cuda {

// Four values of a row of out at column d.
__device__ __forceinline__ void store_values(const QueryView& q, int64_t row, int64_t d, float4 x) {
  const int64_t at = row + d;
  switch (q.out_dtype) {
    case Dtype::kFloat32: *reinterpret_cast<float4*>(static_cast<float*>(q.out) + at) = x; break;
    case Dtype::kFloat16:
      store(static_cast<uint16_t*>(q.out) + at,
            Vector<uint32_t, 2>{ptx::pack<Float16>(x.x, x.y), ptx::pack<Float16>(x.z, x.w)});
      break;
    case Dtype::kBfloat16:
      store(static_cast<uint16_t*>(q.out) + at,
            Vector<uint32_t, 2>{ptx::pack<Bfloat16>(x.x, x.y), ptx::pack<Bfloat16>(x.z, x.w)});
      break;
  }
}

__device__ __forceinline__ float sink_of(const ScoreOptions& o, int64_t q_head) {
  return o.sinks ? o.sinks[q_head * o.sinks_stride] : -kInf;
}

// Where a (batch, token, query head) stands in out and lse.
__device__ __forceinline__ int64_t out_offset(const QueryView& q, int64_t batch, int64_t token, int64_t q_head) {
  return batch * q.out_stride[0] + token * q.out_stride[1] + q_head * q.out_stride[2];
}
__device__ __forceinline__ int64_t lse_offset(const QueryView& q, int64_t batch, int64_t token, int64_t q_head) {
  return batch * q.lse_stride[0] + q_head * q.lse_stride[1] + token * q.lse_stride[2];
}

// Four values of a row, which its sums over all keys give; the thread of column 0 writes lse.
__device__ __forceinline__ void finish_values(const AttentionParams& p, int64_t batch, int64_t token, int64_t q_head,
                                              int64_t d, const SoftmaxState<Binary>& state, float4 o) {
  const FinishedRow done = finish_row(state, sink_of(p.score, q_head), !state.empty());
  const float scale = done.scale;
  store_values(p.query, out_offset(p.query, batch, token, q_head), d,
               done.zero ? float4{} : float4{o.x * scale, o.y * scale, o.z * scale, o.w * scale});
  if (d == 0) p.query.lse[lse_offset(p.query, batch, token, q_head)] = done.lse;
}

// All heads of a token that sees no key, by one warp. Padding behind the last sequence has no sinks.
__device__ __noinline__ inline void write_blind_token(const AttentionParams& p, int64_t batch, int64_t token,
                                                      bool padding) {
  const QueryView& q = p.query;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  for (int64_t h = 0; h < q.q_heads; ++h) {
    for (int64_t d = lane * 4; d < q.head_dim; d += 32 * 4) store_values(q, out_offset(q, batch, token, h), d, {});
    if (lane == 0) q.lse[lse_offset(q, batch, token, h)] = padding ? -kInf : sink_of(p.score, h);
  }
}

// a, o <- a, o merged with b, x. An empty side's sums stay out, whatever they hold.
__device__ __forceinline__ void merge_values(SoftmaxState<Binary>& a, float4& o, const SoftmaxState<Binary>& b,
                                             float4 x) {
  if (b.empty()) return;
  const bool alone = a.empty();
  const MergeWeights w = merge(a, b);
  o = alone ? x : float4{o.x * w.a + x.x * w.b, o.y * w.a + x.y * w.b, o.z * w.a + x.z * w.b, o.w * w.a + x.w * w.b};
}

}  // namespace flashq::cuda
