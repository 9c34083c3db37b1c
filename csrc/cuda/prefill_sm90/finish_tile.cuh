// From accumulators to out and lse: sinks, rows that see nothing, rows that see one key, splits.
//
// What follows from the thread's number is worked out anew here (ptx::fresh_thread): kept in registers over the main
// loop, it would spill.
#pragma once
#include "cuda/finish_row.cuh"
#include "cuda/prefill_sm90/softmax.cuh"
#include "cuda/ptx/barrier.cuh"
#include "cuda/ptx/fresh_thread.cuh"
#include "cuda/ptx/ldmatrix.cuh"
#include "cuda/ptx/mma.cuh"
#include "cuda/ptx/tma.cuh"
#include "cuda/vector.cuh"

namespace flashq::cuda::sm90 {

// A tile's row: its query, and its head among all.
__device__ __forceinline__ RowPlace place_row(const Schedule& s, const Tile& tile, int row) {
  const int query = row >> s.pack_log2;
  return {query, (tile.head << s.pack_log2) + row - (query << s.pack_log2)};
}

// Tokens and heads in the order of Params::partial_out.
__device__ __forceinline__ int64_t partial_row(const Params& p, const Tile& tile, RowPlace place) {
  const Schedule& s = p.schedule;
  const int64_t token = (int64_t{tile.split} * s.batch + tile.batch) * s.q_len + tile.q_begin + place.query;
  return token * (s.head_packs << s.pack_log2) + place.head;
}

// Off by at most 2^-22, relative where x is outside (0.5, 2); of 0 it is -inf.
__device__ __forceinline__ float log2_approx(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// cuda::finish_row by the special function unit and, where there are no sinks, without branches. `sum` is the whole
// row's. `sees`: some key, as far as is known without the page table and the scores.
__device__ __forceinline__ FinishedRow finish_row(const Params& p, const Tile& tile, RowPlace place, float max,
                                                  float sum, bool sees) {
  SoftmaxState<Binary> state{max * p.scale_log2, sum};
  float weight = 1, nothing = -kInf;  // the lse of a row that sees no key
  if (p.sinks && tile.kv_len >= 0 && tile.split == 0) nothing = p.sinks[place.head * p.sinks_stride];
  if (nothing != -kInf) weight = merge(state, SoftmaxState<Binary>{nothing * kLog2E, 1}).a;
  return {sees ? (state.max + log2_approx(state.sum)) * kLn2 : nothing, sees ? __fdividef(weight, state.sum) : 0,
          !sees};  // of nothing but -inf scores: -inf, and 0 / 0
}

__device__ __forceinline__ void store_lse(const Params& p, const Tile& tile, RowPlace place, float lse) {
  if (place.query >= tile.q_len) return;
  float* to = p.lse + tile.batch * p.lse_stride[0] + place.head * p.lse_stride[1] +
              (tile.q_begin + place.query) * p.lse_stride[2];
  if (p.schedule.splits > 1) to = p.partial_lse + partial_row(p, tile, place);
  *to = lse;
}

// Rows of one warp (16, from `row0` on) that see one key, and no sink. `found`: this thread's rows, lane / 4 and 8
// further, have met a key here whose score is neither NaN nor -inf. put(row of 16, chunk, eight values).
template <class Put> __device__ __forceinline__ void copy_lone_values(const Params& p, const Tile& tile, int row0,
                                                                      const bool (&found)[2], const Put& put) {
  const int lane = ptx::fresh_lane();
  const bool first = __shfl_sync(~0u, found[0], lane * 4), second = __shfl_sync(~0u, found[1], lane * 4);
  const auto value_of = [&](int row) -> const uint16_t* {
    const RowPlace place = place_row(p.schedule, tile, row);
    const Keys keys = visible_keys(p.schedule, tile, place.query);
    if (keys.end - keys.begin != 1 || place.query >= tile.q_len) return nullptr;
    if (p.sinks && p.sinks[place.head * p.sinks_stride] != -kInf) return nullptr;
    int64_t page = tile.sequence, slot = tile.k_begin + keys.begin;
    if (p.pages.table.given()) {
      page = p.pages.table(tile.sequence, keys.begin / p.pages.size);  // exists: the row has found it
      slot = keys.begin % p.pages.size;
    }
    return p.v_rows + page * p.v_stride[0] + slot * p.v_stride[1] + tile.head / p.schedule.packs_per_kv * p.v_stride[2];
  };
  const bool own = lane < 8 ? first : lane < 16 && second;
  cuda::copy_lone_values(own ? value_of(row0 + lane) : nullptr, [&](int r, const uint16_t* value) {
    if (lane * 8 < p.head_dim) put(r, lane, load<uint4>(value + lane * 8));
  });
  __syncwarp();
}

// The rows of a tile that ends with its sequence, from the staging buffer, without touching the neighbour's.
template <class C>
__device__ __forceinline__ void store_rows(const Params& p, const Tile& tile, int first_row, const void* staged) {
  const int chunks = p.head_dim / 8;
  for (int i = ptx::fresh_thread() % 128; i < C::kRows * chunks; i += 128) {
    const int r = i / chunks, chunk = i % chunks;
    const auto [query, head] = place_row(p.schedule, tile, first_row + r);
    if (query >= tile.q_len) break;
    const auto from = static_cast<const uint4*>(staged) + (chunk / 8 * C::kRows + r) * 8 + (chunk ^ r) % 8;
    store(p.out_rows + (tile.q_begin + query) * p.out_stride[0] + head * p.out_stride[1] + chunk * 8, *from);
  }
}

// Rows of a split, in fp32, for merge_splits.cuh.
template <int kTileD>
__device__ __forceinline__ void store_partial(const Params& p, const Tile& tile, int thread_row,
                                              const float (&o)[kTileD / 2], const float (&scale)[2]) {
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const RowPlace place = place_row(p.schedule, tile, thread_row + 8 * h);
    if (place.query >= tile.q_len) continue;
    float* out = p.partial_out + partial_row(p, tile, place) * p.head_dim;
#pragma unroll
    for (int j = 0; j < kTileD / 8; ++j) {
      const int column = 8 * j + static_cast<int>(threadIdx.x % 4) * 2;
      if (column < p.head_dim)
        store(out + column, float2{o[4 * j + 2 * h] * scale[h], o[4 * j + 2 * h + 1] * scale[h]});
    }
  }
}

// copy_lone_values for a split.
template <class T>
__device__ __forceinline__ void copy_lone_partials(const Params& p, const Tile& tile, int row0,
                                                   const bool (&found)[2]) {
  __syncwarp();
  copy_lone_values(p, tile, row0, found, [&](int r, int chunk, uint4 values) {
    float* out = p.partial_out + partial_row(p, tile, place_row(p.schedule, tile, row0 + r)) * p.head_dim + chunk * 8;
    const uint32_t words[4] = {values.x, values.y, values.z, values.w};
#pragma unroll
    for (int i = 0; i < 8; ++i) out[i] = T::load(static_cast<uint16_t>(words[i / 2] >> (16 * (i % 2))));
  });
}

// Writes the rows of a warpgroup; `staged` is its Q, which nobody needs any more once all four warps have come here.
// The last thing the leader does is to commit a TMA store from there, or nothing.
template <class C>
__device__ __forceinline__ void finish_tile(const Params& p, const Tile& tile, int wg,
                                            typename C::SharedMemory::Box (&staged)[C::kBoxes][C::kRows],
                                            bool found_all, float (&o)[C::kTileD / 2], RowState& rows) {
  using Element = typename C::Element;
  const unsigned thread = ptx::fresh_thread(), lane = thread % 32;  // shifts and masks, unlike of an int
  const int row0 = tile.row + wg * C::kRows, warp_row = static_cast<int>(thread % 128 / 32 * 16);
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    rows.sum[h] += __shfl_xor_sync(~0u, rows.sum[h], 1);
    rows.sum[h] += __shfl_xor_sync(~0u, rows.sum[h], 2);
  }
  const bool found[2] = {rows.sum[0] > 0, rows.sum[1] > 0};
  // Of the four lanes that share two rows, each finishes one: odd lanes the second one.
  const bool odd = thread % 2 != 0;
  const auto find_place = [&] {
    const unsigned fresh = ptx::fresh_thread();
    return place_row(p.schedule, tile, row0 + row_of_thread(fresh) + static_cast<int>(fresh % 2 * 8));
  };
  const RowPlace place = find_place();
  const Keys keys = visible_keys(p.schedule, tile, place.query);
  const float sum = odd ? rows.sum[1] : rows.sum[0], max = odd ? rows.max[1] : rows.max[0];
  const bool sees = ::max(keys.begin, tile.first * C::kTileK) < min(keys.end, tile.end * C::kTileK);
  const FinishedRow done = finish_row(p, tile, place, max, sum, sees && (found_all || sum != 0));
  const float other = __shfl_xor_sync(~0u, done.scale, 1);
  const float scale[2] = {odd ? other : done.scale, odd ? done.scale : other};
  if (const unsigned zero = __ballot_sync(~0u, done.zero)) {
#pragma unroll
    for (int i = 0; i < C::kTileD / 2; ++i) o[i] = zero >> ((lane & ~1u) | i / 2 % 2) & 1 ? 0 : o[i];
  }
  const bool lone = __any_sync(~0u, keys.end - keys.begin <= 1);
  // All four warps are done with Q; where they take turns, they have met since.
  if constexpr (!C::kStartEarly) ptx::named_barrier_sync(C::warpgroup_barrier(wg), 128);
  if (p.schedule.splits > 1) {
    store_partial<C::kTileD>(p, tile, row0 + row_of_thread(thread), o, scale);
    if (lone) copy_lone_partials<Element>(p, tile, row0 + warp_row, found);
  } else {
    // O through Q's buffer. Lane 8 i + j names row j of tile i of 8 x 8 values; tiles are rows 0-7 and 8-15 of
    // columns 0-7, then of columns 8-15.
    const uint32_t staged_lane =
        ptx::shared_address(staged) + (warp_row + lane % 16) * 128 + (lane / 16 ^ lane % 8) * 16;
#pragma unroll
    for (int c = 0; c < C::kTileD / 16; ++c) {  // chunks 2 c and 2 c + 1, of 16 bytes
      const float* x = &o[8 * c];
      ptx::stmatrix_x4((staged_lane ^ c % 4 * 32) + c / 4 * sizeof staged[0],
                       ptx::pack<Element>(x[0] * scale[0], x[1] * scale[0]),
                       ptx::pack<Element>(x[2] * scale[1], x[3] * scale[1]),
                       ptx::pack<Element>(x[4] * scale[0], x[5] * scale[0]),
                       ptx::pack<Element>(x[6] * scale[1], x[7] * scale[1]));
    }
    if (lone) {
      __syncwarp();
      auto* warp_staged = reinterpret_cast<uint4*>(staged) + warp_row * 8;
      copy_lone_values(p, tile, row0 + warp_row, found, [&](int r, int chunk, uint4 value) {
        warp_staged[chunk / 8 * (C::kRows * 8) + r * 8 + (chunk ^ r) % 8] = value;
      });
    }
    const int token = row0 >> p.schedule.pack_log2;
    const bool whole = !p.packed_queries || (row0 + C::kRows) >> p.schedule.pack_log2 <= tile.q_len;
    ptx::fence_async_proxy();  // of the stores above: TMA reads the buffer, or fills it again
    ptx::named_barrier_sync(C::warpgroup_barrier(wg), 128);
    if (!whole) {
      store_rows<C>(p, tile, row0, staged);
      ptx::named_barrier_sync(C::warpgroup_barrier(wg), 128);
    } else if (thread % 128 == 0 && token < tile.q_len) {
#pragma unroll
      for (int box = 0; box < C::kBoxes; ++box)
        ptx::tma_store(p.out, {box * 64, 0, tile.q_begin + token, tile.head, tile.batch}, staged[box]);
      ptx::tma_store_commit();
    }
  }
  if (ptx::fresh_thread() % 4 < 2) store_lse(p, tile, find_place(), done.lse);  // late: no fence waits for it
}

}  // namespace flashq::cuda::sm90
