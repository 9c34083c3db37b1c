// From accumulators to out and lse: sinks, rows that see nothing, rows that see one key.
#pragma once
#include "cuda/finish_row.cuh"
#include "cuda/kv_rows.cuh"
#include "cuda/kv_splits.cuh"
#include "cuda/ptx/mma.cuh"
#include "cuda/row_block.cuh"
#include "cuda/softmax_step.cuh"

namespace flashq::cuda {

// `all_found`: all visible keys were there.
__device__ __forceinline__ FinishedRow finish_row(const Attention16Params& p, const RowBlock& block, RowPlace place,
                                                  SoftmaxState<Binary> state, bool all_found) {
  const int64_t head = block.kv_head * block.group + place.head;
  const float sink = p.score.sinks && !block.sequence.padding ? p.score.sinks[head * p.score.sinks_stride] : -kInf;
  return finish_row(state, sink, !block.visible(place).empty() && (all_found || !state.empty()));
}

// Writes the rows of one warp. `tile` is the block's query tile: the warp's own rows of it are free now, and turn the
// fragments into whole rows.
template <class T, int kDim, int kM> __device__ __forceinline__ void finish_rows(
    const Attention16Params& p, const RowBlock& block, const RowPlace* places, int warp_row, const RowStates<kM>& state,
    float (&acc)[kM][kDim / 8][4], unsigned char* tile, bool all_found) {
  const QueryView& q = p.query;
  const int lane = static_cast<int>(threadIdx.x) % 32, column = lane % 4 * 2;

  // Four lanes share 2 kM rows: each finishes one of them. Straight code that runs once costs more than its
  // instructions, because it has to be fetched.
  constexpr int kOwn = 2 * kM;
  const int own = lane % kOwn, own_row = warp_row + 8 * own + lane / 4;
  SoftmaxState<Binary> total;
#pragma unroll
  for (int i = 0; i < kOwn; ++i) {
    const float sum = reduce_row_sum(state.sum[i / 2][i % 2]);
    if (own == i) total = {state.max[i / 2][i % 2], sum};
  }
  const RowPlace place = places[own_row];
  const FinishedRow done = finish_row(p, block, place, total, all_found);
  if (own_row < block.rows && lane % 4 < kOwn)
    q.lse[block.offset(place, q.lse_stride[0], q.lse_stride[2], q.lse_stride[1])] = done.lse;
  const auto of_row = [&](auto x, int i) { return __shfl_sync(~0u, x, lane / 4 * 4 + i); };
  if (__any_sync(~0u, done.zero)) {
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      const bool zero = of_row(static_cast<int>(done.zero), i) != 0;
#pragma unroll
      for (int a = 0; a < kDim / 8; ++a)
#pragma unroll
        for (int j = i % 2 * 2; j < i % 2 * 2 + 2; ++j) acc[i / 2][a][j] = zero ? 0 : acc[i / 2][a][j];
    }
  }
#pragma unroll
  for (int i = 0; i < kOwn; ++i) {
    const float scale = of_row(done.scale, i);
#pragma unroll
    for (int a = 0; a < kDim / 8; ++a)
#pragma unroll
      for (int j = i % 2 * 2; j < i % 2 * 2 + 2; ++j) acc[i / 2][a][j] *= scale;
  }
  if (q.out_dtype == Dtype::kFloat32) {
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int row = warp_row + 16 * m + 8 * r + lane / 4;
        if (row >= block.rows) continue;
        auto* out = static_cast<float*>(q.out) +
                    block.offset(places[row], q.out_stride[0], q.out_stride[1], q.out_stride[2]) + column;
#pragma unroll
        for (int a = 0; a < kDim / 8; ++a)
          if (8 * a < q.head_dim) store(out + 8 * a, Vector<float, 2>{acc[m][a][2 * r], acc[m][a][2 * r + 1]});
      }
    return;
  }
#pragma unroll
  for (int m = 0; m < kM; ++m)
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      unsigned char* row = tile + (warp_row + 16 * m + 8 * r + lane / 4) * SharedTile<kDim>::kRowBytes + column * 2;
#pragma unroll
      for (int a = 0; a < kDim / 8; ++a)
        store(row + ((a ^ lane / 4) << 4), ptx::pack<T>(acc[m][a][2 * r], acc[m][a][2 * r + 1]));
    }
  __syncwarp();
  const int64_t own_offset =
      block.offset(places[warp_row + lane % (16 * kM)], q.out_stride[0], q.out_stride[1], q.out_stride[2]);
  copy_warp_rows<kDim, 16 * kM>(own_offset, [&](int row, int chunk, int64_t at) {
    if (warp_row + row < block.rows && chunk * 8 < q.head_dim)
      store(static_cast<uint16_t*>(q.out) + at,
            load<Vector<uint32_t, 4>>(tile + SharedTile<kDim>::offset(warp_row + row, chunk)));
  });
}

// Leaves the rows of one warp as a partial result.
template <int kDim, int kM> __device__ __forceinline__ void store_partial(const Partial& to, int warp_row,
                                                                          const RowStates<kM>& state,
                                                                          const float (&acc)[kM][kDim / 8][4],
                                                                          bool all_found) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  if (threadIdx.x == 0) *to.all_found = all_found;
#pragma unroll
  for (int m = 0; m < kM; ++m)
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = warp_row + 16 * m + 8 * r + lane / 4;
      const float sum = reduce_row_sum(state.sum[m][r]);
      if (lane % 4 == 0) to.state[row] = {state.max[m][r], sum};
      float* out = to.out + row * kDim + lane % 4 * 2;
#pragma unroll
      for (int a = 0; a < kDim / 8; ++a) store(out + 8 * a, Vector<float, 2>{acc[m][a][2 * r], acc[m][a][2 * r + 1]});
    }
}

// Rows of one warp that see one key, and no sink; at most 32.
template <class T> __device__ __forceinline__ void copy_lone_values(const Attention16Params& p, const RowBlock& block,
                                                                    const RowPlace* places, int warp_row, int rows) {
  const QueryView& q = p.query;
  const Mask& mask = block.sequence.mask;
  // The number of visible keys is least at an end.
  if (min_of(mask.visible(block.first_query).size(), mask.visible(block.last_query).size()) > 1) return;
  __syncwarp();
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const auto value_of = [&](RowPlace place) -> const uint16_t* {
    const KeyRange keys = block.visible(place);
    if (keys.size() != 1) return nullptr;
    const int64_t head = block.kv_head * block.group + place.head;
    if (p.score.sinks && p.score.sinks[head * p.score.sinks_stride] != -kInf) return nullptr;
    const float lse = q.lse[block.offset(place, q.lse_stride[0], q.lse_stride[2], q.lse_stride[1])];
    const KeySlot slot = slot_of(p.kv, block.sequence, keys.begin);
    if (!isfinite(lse) || slot.page < 0) return nullptr;  // NaN, or the key scores -inf: out is NaN
    return static_cast<const uint16_t*>(p.kv.v) + offset_of(slot, p.kv.v_stride, block.kv_head);
  };
  const bool real = lane < min_of(rows, block.rows - warp_row);
  copy_lone_values(real ? value_of(places[warp_row + lane]) : nullptr, [&](int row, const uint16_t* value) {
    const int64_t at = block.offset(places[warp_row + row], q.out_stride[0], q.out_stride[1], q.out_stride[2]);
    for (int64_t d = lane; d < q.head_dim; d += 32) {
      if (q.out_dtype == Dtype::kFloat32)
        static_cast<float*>(q.out)[at + d] = T::load(value[d]);
      else
        static_cast<uint16_t*>(q.out)[at + d] = value[d];
    }
  });
}

}  // namespace flashq::cuda
