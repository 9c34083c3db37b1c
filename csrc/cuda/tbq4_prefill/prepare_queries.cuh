// Queries as the kernel wants them: rotated, scaled to fp16 by a power of two for each row, with what fp16 left of them
// beside; and as they are, for page offsets.
#pragma once
#include "cuda/ptx/dependent_launch.cuh"
#include "cuda/tbq4/rows.cuh"
#include "cuda/tbq4_attention/queries.cuh"
#include "cuda/tbq4_prefill/traits.cuh"

namespace flashq::cuda::tbq4_sm90 {

struct PrepareParams {
  QueryView query;
  float factor, scale;          // of ScoreRule, of the call
  float row_factor;             // of scores, beside the norms'
  uint16_t *high, *rest, *raw;  // (token, head, column); raw null: not wanted
  RowScale* rows;
  bool wide;
};

// Reduces over the lanes of a row.
template <int kLanes, class Combine>
__device__ __forceinline__ float reduce_lanes(float x, Combine combine) {
#pragma unroll
  for (int i = 1; i < kLanes; i *= 2) x = combine(x, __shfl_xor_sync(kWholeWarp, x, i));
  return x;
}
__device__ __forceinline__ float largest_of(const float (&x)[8]) {
  float top = 0;
#pragma unroll
  for (int i = 0; i < 8; ++i) top = fmaxf(top, fabsf(x[i]));
  return top;
}
__device__ __forceinline__ float larger(float a, float b) { return fmaxf(a, b); }

// x * inverse in fp16, and what that leaves.
struct HalfParts { uint4 high, rest; };
__device__ __forceinline__ HalfParts split_halves(const float (&x)[8], float inverse) {
  uint32_t high[4], rest[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float a = x[2 * i] * inverse, b = x[2 * i + 1] * inverse;
    high[i] = ptx::pack<Float16>(a, b);
    rest[i] = ptx::pack<Float16>(a - half_to_float(static_cast<uint16_t>(high[i])),
                                 b - half_to_float(static_cast<uint16_t>(high[i] >> 16)));
  }
  return {{high[0], high[1], high[2], high[3]}, {rest[0], rest[1], rest[2], rest[3]}};
}

// Lanes of eight values each.
template <class T, int kDim>
__global__ void __launch_bounds__(128) prepare_queries(const __grid_constant__ PrepareParams p) {
  using Lanes = BlockLanes<tbq4::block_width(kDim)>;
  constexpr int kLanes = kDim / 8;  // of a row
  ptx::allow_dependents();
  const Lanes lanes;
  const QueryView& q = p.query;
  const int64_t row = (int64_t{blockIdx.x} * 128 + threadIdx.x) / kLanes;
  const int lane = static_cast<int>(threadIdx.x) % kLanes, column = lane * 8;
  const bool real = row < q.total_tokens * q.q_heads;
  float x[8] = {};
  if (real) {
    const Quotient at = divide(row, q.q_heads);  // token, head
    const bool packed = q.cu_seqlens_q.given();
    const Quotient place = packed ? Quotient{0, at.quotient} : divide(at.quotient, q.q_len);  // sequence, its token
    const auto* from = static_cast<const uint16_t*>(q.q) + place.quotient * q.q_stride[0] +
                       place.remainder * q.q_stride[1] + at.remainder * q.q_stride[2] + column;
    if (p.wide)
      load_values<T, true>(from, x);
    else
      load_values<T, false>(from, x);
  }
  const int64_t to = row * kDim + column;
  float raw_unit = 0;
  if (p.raw) {
    const FloatUnit raw(reduce_lanes<kLanes>(largest_of(x), larger));
    raw_unit = raw.unit;
    if (real) store(p.raw + to, split_halves(x, raw.inverse).high);
  }
  lanes.template rotate<false>(x);
  // Most rows are as they are, so that consumers need not multiply by a factor of each.
  FloatUnit scaled(reduce_lanes<kLanes>(largest_of(x), larger));
  if (scaled.unit >= 0x1p-15f && scaled.unit <= 0x1p3f) scaled.unit = scaled.inverse = 1;
  if (real) {
    const HalfParts parts = split_halves(x, scaled.inverse);
    store(p.high + to, parts.high);
    store(p.rest + to, parts.rest);
  }
  float squares = 0;
#pragma unroll
  for (float y : x) squares = fmaf(y * scaled.inverse, y * scaled.inverse, squares);
  squares = reduce_lanes<kLanes>(squares, [](float a, float b) { return a + b; });
  if (real && lane == 0)
    p.rows[row] = {{scaled.unit * p.row_factor, raw_unit * p.factor}, sqrtf(squares) * (scaled.unit * fabsf(p.scale))};
}

}  // namespace flashq::cuda::tbq4_sm90
