// The 64 rows of a warpgroup, whose products are wgmma's (compute capability 9.0), with rows as rows: of its warp's 16
// rows, lane 4 g + t has rows g and g + 8, columns 8 i + 2 t and 8 i + 2 t + 1 of the results.
//   S (64 rows, 64 tokens) = Q (64, kDim) K^T (kDim, 64),   O (64, kDim) += P (64, 64 tokens) V (64, kDim)
// Q and P are in registers. mma.sync would read every tile once for each of the four warps, and shared memory sets the
// pace then.
#pragma once
#include "core/mask.h"
#include "cuda/decode/row_results.cuh"
#include "cuda/ptx/wgmma.cuh"

namespace flashq::cuda {

inline constexpr int kWideTokens = 64;  // of a tile

// K or V of a tile as wgmma reads it: boxes of 64 columns, with 16-byte chunks exchanged within eight rows.
template <int kDim> struct BoxedTile {
  static constexpr int kRowBytes = 128, kBoxBytes = kWideTokens * kRowBytes;

  static __device__ __forceinline__ uint32_t offset(int row, int chunk) {
    return static_cast<uint32_t>(chunk / 8 * kBoxBytes + row * kRowBytes + ((chunk % 8 ^ (row & 7)) << 4));
  }
};

template <int kDim> class WideRows {
 public:
  static constexpr int kSteps = kDim / 16;

  // A tile of K at `k` and one of V at `v`, in shared memory. q: rows g and g + 8 (QueryRow::load_pairs). `first`: its
  // first token; `clear`: all rows see all of it. Else `ranges` are the keys of the warp's rows, and `pages` has a bit
  // for each token that has a page, 16 a word.
  template <class T>
  __device__ __forceinline__ void attend(const ScoreRule& rule, const uint32_t (&q)[2][2 * kSteps], const void* k,
                                         const void* v, int first, bool clear, const TileRange* ranges,
                                         const uint32_t* pages) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    float s[kWideTokens / 2] = {};
    const uint64_t k_descriptor = ptx::matrix_descriptor(k, 16);
    ptx::pin(s);
    ptx::wgmma_fence();
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {  // a box holds four steps
      const uint32_t a[4] = {q[0][2 * i], q[1][2 * i], q[0][2 * i + 1], q[1][2 * i + 1]};
      ptx::Wgmma<kWideTokens>::template rs<T, 0>(s, a,
                                                 k_descriptor + (i / 4 * BoxedTile<kDim>::kBoxBytes + i % 4 * 32) / 16);
    }
    ptx::wgmma_commit();
    ptx::wgmma_wait<0>();
    ptx::pin(s);

    auto& scores = reinterpret_cast<float (&)[1][kWideTokens / 8][4]>(s);
    float factor = rule.factor;
    if (!rule.plain) {
      rule.apply(scores);
      factor = 1;
    }
    if (clear) {
      sees_[0] = sees_[1] = true;
    } else {
      const uint64_t there = uint64_t{pages[2] | pages[3] << 16} << 32 | (pages[0] | pages[1] << 16);
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const TileRange keys = ranges[8 * r + static_cast<int>(threadIdx.x) % 32 / 4];
        const uint64_t seen = there & tile_bits({keys.begin, keys.end}, first);
        sees_[r] |= seen != 0;
        mask_row(scores[0], r, {static_cast<uint32_t>(seen), static_cast<uint32_t>(seen >> 32)});
      }
    }
    raise_maxima(scores, factor, state_, reinterpret_cast<float (&)[1][kDim / 8][4]>(o_));
    uint32_t weight[kWideTokens / 16][4];
#pragma unroll
    for (int i = 0; i < kWideTokens / 16; ++i)
      weigh<T>(scores[0][2 * i], scores[0][2 * i + 1], factor, state_.max[0], state_.sum[0], weight[i]);

    const uint64_t v_descriptor = ptx::matrix_descriptor(v, BoxedTile<kDim>::kBoxBytes);
    ptx::pin(o_);
    ptx::wgmma_fence();
#pragma unroll
    for (int i = 0; i < kWideTokens / 16; ++i)
      ptx::Wgmma<kDim>::template rs<T>(o_, weight[i], v_descriptor + i * (16 * 128 / 16));
    ptx::wgmma_commit();
    ptx::wgmma_wait<0>();
    ptx::pin(o_);
#endif
  }

  __device__ __forceinline__ void complete_sums() {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      state_.sum[0][r] = reduce_row_sum(state_.sum[0][r]);
      if (sees_[r] && state_.max[0][r] == -kInf) state_.max[0][r] = kLeastMaximum;
    }
  }

  // Rows that see one key get its value as it is: a sum loses the sign of a -0.
  template <class T> __device__ __forceinline__ void copy_lone_values(const DecodeParams& p, const Segment& segment,
                                                                      const ItemRows& item, int first_row) {
    for_rows(item, first_row, [&](int r, int row) {
      if (state_.sum[0][r] != 1 || !(fabsf(state_.max[0][r]) < kInf)) return;
      const uint16_t* v = find_lone_value(p, segment, item, row);
      if (v)
        for_columns(p, [&](int i, int d) {
          o_[4 * i + 2 * r] = T::load(v[d]), o_[4 * i + 2 * r + 1] = T::load(v[d + 1]);
        });
    });
  }

  // Writes out and lse: nobody else has keys of the item.
  template <class T> __device__ __forceinline__ void finish(const DecodeParams& p, const Segment& segment,
                                                            const ItemRows& item, int first_row) {
    const QueryView& q = p.call.query;
    const int group = p.split.group_size();
    for_rows(item, first_row, [&](int r, int row) {
      const int query = p.split.group.quotient(item.first_row + row);
      const int64_t head = item.kv_head * group + item.first_row + row - query * group;
      const int64_t batch = segment.sequence.batch, token = segment.sequence.q_begin + query;
      const SoftmaxState<Binary> state{state_.max[0][r], state_.sum[0][r]};
      const FinishedRow done = finish_row(state, sink_of(p.call.score, head), !state.empty());
      if (threadIdx.x % 4 == 0) q.lse[lse_offset(q, batch, token, head)] = done.lse;
      const int64_t to = out_offset(q, batch, token, head);
      for_columns(p, [&](int i, int d) {
        const float scale = done.scale;
        const float2 x = done.zero ? float2{} : float2{o_[4 * i + 2 * r] * scale, o_[4 * i + 2 * r + 1] * scale};
        if (q.out_dtype == Dtype::kFloat32)
          *reinterpret_cast<float2*>(static_cast<float*>(q.out) + to + d) = x;
        else
          *reinterpret_cast<uint32_t*>(static_cast<uint16_t*>(q.out) + to + d) = ptx::pack<T>(x.x, x.y);
      });
    });
  }

  // Writes a partial result: row r to to_row(r) and state_of(r).
  template <class ToRow, class StateOf> __device__ __forceinline__ void park(const DecodeParams& p,
                                                                             const ItemRows& item, int first_row,
                                                                             ToRow to_row, StateOf state_of) {
    for_rows(item, first_row, [&](int r, int row) {
      if (threadIdx.x % 4 == 0) state_of(row) = {state_.max[0][r], state_.sum[0][r]};
      float* to = to_row(row);
      for_columns(p, [&](int i, int d) {
        *reinterpret_cast<float2*>(to + d) = float2{o_[4 * i + 2 * r], o_[4 * i + 2 * r + 1]};
      });
    });
  }

 private:
  // Calls body(r, row) for this lane's rows of the item.
  template <class Body> static __device__ __forceinline__ void for_rows(const ItemRows& item, int first_row,
                                                                        Body body) {
#pragma unroll
    for (int r = 0; r < 2; ++r)
      if (const int row = first_row + 8 * r + static_cast<int>(threadIdx.x) % 32 / 4; row < item.rows) body(r, row);
  }
  // Calls body(i, d) for this lane's pairs of columns: d and d + 1.
  template <class Body> static __device__ __forceinline__ void for_columns(const DecodeParams& p, Body body) {
    const int eights = static_cast<int>(p.call.query.head_dim) / 8, first = static_cast<int>(threadIdx.x) % 4 * 2;
#pragma unroll
    for (int i = 0; i < kDim / 8; ++i)
      if (i < eights) body(i, 8 * i + first);
  }

  RowStates<1> state_;
  bool sees_[2] = {};
  float o_[kDim / 2] = {};
};

}  // namespace flashq::cuda
