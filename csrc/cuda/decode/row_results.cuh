// Query rows of a warp in the fragments of mma.m16n8k16, rows as columns: lane 4 g + t feeds row 8 n + g, and of the
// results has rows 8 n + 2 t + c (c = 0, 1), columns 16 i + g and 16 i + 8 + g.
#pragma once
#include <cfloat>

#include "cuda/decode/call.h"
#include "cuda/decode/finish.cuh"

namespace flashq::cuda {

// A query row of an item, or zeros past the last one.
struct QueryRow {
  const uint16_t* q = nullptr;

  __device__ __forceinline__ QueryRow(const DecodeParams& p, const Segment& segment, const ItemRows& item, int row) {
    if (row >= item.rows) return;
    const QueryView& view = p.call.query;
    const int group = p.split.group_size(), query = p.split.group.quotient(item.first_row + row);
    const int head = item.kv_head * group + item.first_row + row - query * group;
    q = static_cast<const uint16_t*>(view.q) + segment.sequence.batch * view.q_stride[0] +
        (segment.sequence.q_begin + query) * view.q_stride[1] + head * view.q_stride[2];
  }
  // Values d and d + 1, d even.
  __device__ __forceinline__ uint32_t pair(const DecodeParams& p, int d) const {
    if (!q || d >= p.call.query.head_dim) return 0;
    if (p.wide_q) return load<uint32_t>(q + d);
    return q[d] | uint32_t{q[d + 1]} << 16;
  }
  // All pairs of lane 4 g + t: columns 8 i + 2 t and 8 i + 2 t + 1.
  template <int kDim> __device__ __forceinline__ void load_pairs(const DecodeParams& p,
                                                                 uint32_t (&to)[kDim / 8]) const {
    const int column = static_cast<int>(threadIdx.x) % 4 * 2;
    if (p.wide_q && p.call.query.head_dim == kDim) {
#pragma unroll
      for (int i = 0; i < kDim / 8; ++i) to[i] = q ? load<uint32_t>(q + column + 8 * i) : 0;
    } else {
#pragma unroll
      for (int i = 0; i < kDim / 8; ++i) to[i] = pair(p, 8 * i + column);
    }
  }
};

// The value of the only key that a row of an item sees, or null.
__device__ __forceinline__ const uint16_t* find_lone_value(const DecodeParams& p, const Segment& segment,
                                                           const ItemRows& item, int row) {
  const KeyRange keys = segment.sequence.mask(p.call.score).visible(p.split.group.quotient(item.first_row + row));
  if (keys.size() != 1) return nullptr;
  const KvView& kv = p.call.kv;
  int64_t page = segment.sequence.batch, slot = keys.begin;
  if (kv.block_table.given()) {
    const Quotient at = divide(keys.begin, p.page_size);
    page = kv.block_table(page, at.quotient);
    slot = at.remainder;
  }
  return static_cast<const uint16_t*>(kv.v) + page * kv.v_stride[0] + slot * kv.v_stride[1] +
         item.kv_head * kv.v_stride[2];
}

// The maximum of a row that has seen keys, but none whose score is more than -inf: they weigh exp2(-inf - it) = 0, not
// NaN, and (it, 0) is no empty state. Its sums are 0 / 0 in the end, NaN as in eager attention, unless there is a sink.
inline constexpr float kLeastMaximum = -FLT_MAX;

// Softmax states and sums of a warp's rows. max is the same in all lanes of a row; sum is each lane's own part until
// complete_sums().
template <int kTiles, int kSteps> struct RowSums {
  float max[kTiles][2], sum[kTiles][2] = {}, acc[kTiles][kSteps][4] = {};

  __device__ __forceinline__ RowSums() {
#pragma unroll
    for (int i = 0; i < 2 * kTiles; ++i) max[i / 2][i % 2] = -kInf;
  }

  // s: scores of 16 kDepth tokens, (kDepth, kTiles) fragments. Raises the maxima where that is needed, to `least` at
  // least: kLeastMaximum for a row that sees one of this lane's tokens, else -inf.
  template <int kDepth> __device__ __forceinline__ void raise_maxima(const float (&s)[kDepth * kTiles][4],
                                                                     const float (&least)[kTiles][2]) {
    float top[kTiles][2];
    bool raise = false;
#pragma unroll
    for (int n = 0; n < kTiles; ++n)
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        top[n][c] = fmaxf(fmaxf(s[n][c], s[n][2 + c]), least[n][c]);  // may miss a NaN; the sum does not
        if constexpr (kDepth == 2) top[n][c] = fmaxf(top[n][c], fmaxf(s[kTiles + n][c], s[kTiles + n][2 + c]));
        raise |= top[n][c] > max[n][c] + kLazyGrowth;  // the first finite score of a row is its maximum
      }
    if (!__any_sync(~0u, raise)) return;
#pragma unroll
    for (int n = 0; n < kTiles; ++n)
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        float high = top[n][c];
#pragma unroll
        for (int step = 4; step < 32; step *= 2) high = fmaxf(high, __shfl_xor_sync(~0u, high, step));
        high = fmaxf(high, max[n][c]);
        const float shrink = high == max[n][c] ? 1 : ptx::exp2_approx(max[n][c] - high);
        max[n][c] = high;
        sum[n][c] *= shrink;
#pragma unroll
        for (int i = 0; i < kSteps; ++i) {
          acc[n][i][c] *= shrink;
          acc[n][i][2 + c] *= shrink;
        }
      }
  }

  __device__ __forceinline__ void complete_sums() {
#pragma unroll
    for (int i = 0; i < 2 * kTiles; ++i)
#pragma unroll
      for (int step = 4; step < 32; step *= 2) sum[i / 2][i % 2] += __shfl_xor_sync(~0u, sum[i / 2][i % 2], step);
  }

  // Calls body(n, c, row) for this lane's rows of the item.
  template <class Body> static __device__ __forceinline__ void for_rows(const ItemRows& item, int first_row,
                                                                        Body body) {
    const int t = static_cast<int>(threadIdx.x) % 4;
#pragma unroll
    for (int n = 0; n < kTiles; ++n)
#pragma unroll
      for (int c = 0; c < 2; ++c)
        if (const int row = first_row + 8 * n + 2 * t + c; row < item.rows) body(n, c, row);
  }

  // Calls body(i) for eight columns at a time, from 8 i on.
  template <class Body> static __device__ __forceinline__ void for_columns(const DecodeParams& p, Body body) {
    const auto eights = static_cast<int>(p.call.query.head_dim) / 8;
    if (eights == 2 * kSteps) {
#pragma unroll
      for (int i = 0; i < 2 * kSteps; ++i) body(i);
    } else {
#pragma unroll
      for (int i = 0; i < 2 * kSteps; ++i)
        if (i < eights) body(i);
    }
  }

  // Rows that see one key get its value as it is: a sum loses the sign of a -0.
  template <class T> __device__ __forceinline__ void copy_lone_values(const DecodeParams& p, const Segment& segment,
                                                                      const ItemRows& item, int first_row) {
    for_rows(item, first_row, [&](int n, int c, int row) {
      if (sum[n][c] != 1 || !(fabsf(max[n][c]) < kInf)) return;
      const uint16_t* v = find_lone_value(p, segment, item, row);
      if (!v) return;
      v += static_cast<int>(threadIdx.x) % 32 / 4;
      for_columns(p, [&](int i) { acc[n][i / 2][i % 2 * 2 + c] = T::load(v[8 * i]); });
    });
  }

  // Writes out and lse: nobody else has keys of the item.
  template <class T> __device__ __forceinline__ void finish(const DecodeParams& p, const Segment& segment,
                                                            const ItemRows& item, int first_row) {
    const QueryView& q = p.call.query;
    const int g = static_cast<int>(threadIdx.x) % 32 / 4, group = p.split.group_size();
    for_rows(item, first_row, [&](int n, int c, int row) {
      const int query = p.split.group.quotient(item.first_row + row);
      const int64_t head = item.kv_head * group + item.first_row + row - query * group;
      const int64_t batch = segment.sequence.batch, token = segment.sequence.q_begin + query;
      const SoftmaxState<Binary> state{max[n][c], sum[n][c]};
      const FinishedRow done = finish_row(state, sink_of(p.call.score, head), !state.empty());
      if (g == 0) q.lse[lse_offset(q, batch, token, head)] = done.lse;
      const int64_t to = out_offset(q, batch, token, head);
      const auto write = [&](auto store_value) {
        for_columns(p, [&](int i) {
          store_value(to + 8 * i + g, done.zero ? 0 : acc[n][i / 2][i % 2 * 2 + c] * done.scale);
        });
      };
      if (q.out_dtype == Dtype::kFloat32)
        write([&](int64_t at, float x) { static_cast<float*>(q.out)[at] = x; });
      else
        write([&](int64_t at, float x) {
          static_cast<uint16_t*>(q.out)[at] = static_cast<uint16_t>(ptx::pack<T>(x, 0));
        });
    });
  }

  // Writes a partial result: row r to to_row(r) and state_of(r).
  template <class ToRow, class StateOf> __device__ __forceinline__ void park(const DecodeParams& p,
                                                                             const ItemRows& item, int first_row,
                                                                             ToRow to_row, StateOf state_of) {
    const int g = static_cast<int>(threadIdx.x) % 32 / 4;
    for_rows(item, first_row, [&](int n, int c, int row) {
      if (g == 0) state_of(row) = {max[n][c], sum[n][c]};
      float* to = to_row(row) + g;
      for_columns(p, [&](int i) { to[8 * i] = acc[n][i / 2][i % 2 * 2 + c]; });
    });
  }
};

}  // namespace flashq::cuda
