// A consumer warpgroup: 64 query rows, from Q, K and V in shared memory to O and its lse in global memory.
#pragma once
#include "cuda/finish_row.cuh"
#include "cuda/prefill_sm90/softmax.cuh"
#include "cuda/ptx/fresh_thread.cuh"
#include "cuda/ptx/mma.cuh"
#include "cuda/ptx/tma.cuh"
#include "cuda/ptx/warpgroup.cuh"
#include "cuda/ptx/wgmma.cuh"
#include "cuda/vector.cuh"

namespace flashq::cuda::sm90 {

// Zeros the rows of a V tile from `row` on: a weight of 0 does not cancel the NaN that a neighbour may hold there. By a
// whole warpgroup; the others write the same zeros for themselves, which takes no barrier among them.
template <class C> __device__ __forceinline__ void clear_rows(void* v_tile, int row, int warpgroup) {
  constexpr int kBoxChunks = C::kTileK * 8;
  for (int i = row * 8 + static_cast<int>(threadIdx.x % 128); i < kBoxChunks; i += 128)
#pragma unroll
    for (int box = 0; box < C::kBoxes; ++box) static_cast<uint4*>(v_tile)[box * kBoxChunks + i] = uint4{};
  ptx::fence_async_proxy();
  ptx::named_barrier_sync(C::warpgroup_barrier(warpgroup), 128);
}

// A tile's row: its query, and its head among all.
__device__ __forceinline__ RowPlace place_row(const Schedule& s, const Tile& tile, int row) {
  const int query = row >> s.pack_log2;
  return {query, (tile.head << s.pack_log2) + row - (query << s.pack_log2)};
}

__device__ __forceinline__ float sink_of(const Params& p, const Tile& tile, int head) {
  return p.sinks && tile.kv_len >= 0 ? p.sinks[head * p.sinks_stride] : -kInf;
}

// `sum` is the whole row's. Writes the row's lse.
__device__ __forceinline__ FinishedRow finish_row(const Params& p, const Tile& tile, int row, float max, float sum) {
  const RowPlace place = place_row(p.schedule, tile, row);
  const Keys keys = visible_keys(p.schedule, tile, place.query);
  const FinishedRow done = cuda::finish_row(SoftmaxState<Binary>{max * p.scale_log2, sum}, sink_of(p, tile, place.head),
                                            keys.begin < keys.end);
  if (threadIdx.x % 4 == 0 && place.query < tile.q_len) {
    float* lse = p.lse + tile.batch * p.lse_stride[0] + place.head * p.lse_stride[1];
    lse[(tile.q_begin + place.query) * p.lse_stride[2]] = done.lse;
  }
  return done;
}

// Staged rows of one warp (16, from `row0` on) that see one key, and no sink. `ordinary`: this thread's rows, lane / 4
// and 8 further, are neither NaN nor nothing but -inf.
__device__ __forceinline__ void copy_lone_values(const Params& p, const Tile& tile, int row0, const bool (&ordinary)[2],
                                                 uint4* staged, int box_chunks) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const bool first = __shfl_sync(~0u, ordinary[0], lane * 4), second = __shfl_sync(~0u, ordinary[1], lane * 4);
  const auto value_of = [&](int row) -> const uint16_t* {
    const RowPlace place = place_row(p.schedule, tile, row);
    const Keys keys = visible_keys(p.schedule, tile, place.query);
    if (keys.end - keys.begin != 1 || place.query >= tile.q_len || sink_of(p, tile, place.head) != -kInf)
      return nullptr;
    return p.v_rows + tile.batch * p.v_stride[0] + (tile.k_begin + keys.begin) * p.v_stride[1] +
           tile.head / p.schedule.packs_per_kv * p.v_stride[2];
  };
  const bool own = lane < 8 ? first : lane < 16 && second;
  cuda::copy_lone_values(own ? value_of(row0 + lane) : nullptr, [&](int r, const uint16_t* value) {
    if (lane * 8 < p.head_dim) staged[lane / 8 * box_chunks + r * 8 + (lane ^ r) % 8] = load<uint4>(value + lane * 8);
  });
  __syncwarp();
}

// The rows of a tile that ends with its sequence, from the staging buffer, without touching the neighbour's.
template <class C>
__device__ __forceinline__ void store_rows(const Params& p, const Tile& tile, int first_row, const void* staged) {
  const int chunks = p.head_dim / 8;
  for (int i = static_cast<int>(threadIdx.x % 128); i < C::kRows * chunks; i += 128) {
    const int r = i / chunks, chunk = i % chunks;
    const auto [query, head] = place_row(p.schedule, tile, first_row + r);
    if (query >= tile.q_len) break;
    const auto from = static_cast<const uint4*>(staged) + (chunk / 8 * C::kRows + r) * 8 + (chunk ^ r) % 8;
    store(p.out_rows + (tile.q_begin + query) * p.out_stride[0] + head * p.out_stride[1] + chunk * 8, *from);
  }
}

template <class C> __device__ __forceinline__ void consume(const Params& p, typename C::SharedMemory& shared) {
  using Element = typename C::Element;
  constexpr int kTileK = C::kTileK, kTileD = C::kTileD;
  const int wg = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / 128 - 1, 0);
  const int lane = static_cast<int>(threadIdx.x) % 32, warp_row = static_cast<int>(threadIdx.x) % 128 / 32 * 16;
  const bool leader = threadIdx.x % 128 == 0;
  const uint64_t q_descriptor = ptx::matrix_descriptor(&shared.q[0][wg], 16);
  const uint64_t k_descriptor = ptx::matrix_descriptor(&shared.k, 16);
  const uint64_t v_descriptor = ptx::matrix_descriptor(&shared.v, sizeof shared.v[0][0]);

  float s[kTileK / 2], o[kTileD / 2], o_scale[2];  // S and O, 64 x kTileK and 64 x kTileD
  uint32_t prob[kTileK / 16][4];                   // P in 16 bits
  RowState rows;
  ptx::Ring<C::kStages> k_ring, v_ring;
  ptx::Ring<C::kTileSlots> slots;
  ptx::Ring<C::kQStages> q_ring;

  const auto issue_scores = [&] {  // S = Q K^T
    const uint64_t q = q_descriptor + q_ring.at * (sizeof shared.q[0] >> 4);
    const uint64_t k = k_descriptor + k_ring.at * (sizeof shared.k[0] >> 4);
    ptx::pin(s);
    ptx::wgmma_fence();
#pragma unroll
    for (int d = 0; d < kTileD / 16; ++d)  // a box holds four steps
      ptx::Wgmma<kTileK>::template ss<Element>(s, q + (d / 4 * sizeof shared.q[0][0][0] + d % 4 * 32) / 16,
                                               k + (d / 4 * sizeof shared.k[0][0] + d % 4 * 32) / 16, d > 0);
    ptx::wgmma_commit();
  };
  const auto issue_output = [&] {  // O += P V
    const uint64_t v = v_descriptor + v_ring.at * (sizeof shared.v[0] >> 4);
    ptx::pin(o);
    ptx::wgmma_fence();
#pragma unroll
    for (int n = 0; n < kTileK / 16; ++n) ptx::Wgmma<kTileD>::template rs<Element>(o, prob[n], v + n * (2048 / 16));
    ptx::wgmma_commit();
  };
  const auto round_probabilities = [&] {
#pragma unroll
    for (int i = 0; i < kTileK / 2; i += 2) prob[i / 8][i / 2 % 4] = ptx::pack<Element>(s[i], s[i + 1]);
  };
  const auto release = [&](ptx::Barrier* empty, ptx::Ring<C::kStages>& ring) {
    if (lane == 0) empty[ring.at].arrive();
    ring.advance();
  };
  ptx::Barrier* unread = nullptr;  // of the Q buffer whose O the TMA may still be reading
  const auto retire_store = [&] {
    if (leader && unread) {
      ptx::tma_store_wait_read();
      unread->arrive();
    }
    unread = nullptr;
  };
  const auto take_turn = [&] {
    if constexpr (C::kPingPong) ptx::named_barrier_sync(C::turn_barrier(wg), 256);
  };
  const auto pass_turn = [&] {
    if constexpr (C::kPingPong) ptx::named_barrier_arrive(C::turn_barrier((wg + 1) % C::kConsumers), 256);
  };
  if (wg == C::kConsumers - 1) pass_turn();  // warpgroup 0 starts

  while (true) {
    shared.tile_full[slots.at].wait(slots.parity);
    const Tile& tile = shared.tile[slots.at];
    if (tile.row == kNoTile) return retire_store();
    const int row0 = tile.row + wg * C::kRows, first = tile.first, end = tile.end;
    const int thread_row = row0 + warp_row + lane / 4, thread_column = lane % 4 * 2;
    // Key tiles [clear_first, clear_end) are visible to all rows of this warpgroup.
    const int clear_first =
        (visible_keys(p.schedule, tile, (row0 + C::kRows - 1) >> p.schedule.pack_log2).begin + kTileK - 1) / kTileK;
    const int clear_end = max(0, visible_keys(p.schedule, tile, row0 >> p.schedule.pack_log2).end) / kTileK;
#pragma unroll
    for (int i = 0; i < kTileD / 2; ++i) o[i] = 0;
    rows = {{-kInf, -kInf}, {0, 0}};

    const auto weigh = [&](auto masked, int n) {  // S to P
      if constexpr (C::kTransform) {
        if (p.capped) {
          // Rows past the sequence's end have no say: results must not depend on what lies there.
          const int rows_left = (tile.q_len << p.schedule.pack_log2) - thread_row;
          const bool small = !masked.value && (rows_left <= 0 || within(s, 0, p.cap.limit)) &&
                             (rows_left <= 8 || within(s, 1, p.cap.limit));
          cap_scores(s, p.cap, __all_sync(~0u, small));
        } else {
#pragma unroll
          for (float& x : s) x *= p.cap.multiplier;
        }
      }
      if constexpr (masked.value) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const Keys keys = visible_keys(p.schedule, tile, (thread_row + 8 * h) >> p.schedule.pack_log2);
          const int left = n * kTileK + thread_column;
          mask_scores<kTileK / 4>(columns_in(keys.begin - left, keys.end - left),
                                  [&](int i) -> float& { return s[4 * (i / 2) + 2 * h + i % 2]; });
        }
      }
      return softmax<masked.value>(s, rows, o_scale, p.scale_log2);
    };
    constexpr std::true_type kMasked;
    constexpr std::false_type kClear;

    shared.q_full[q_ring.at][wg].wait(q_ring.parity);
    if (first == end) {
      retire_store();
    } else {
      int n = end - 1;
      shared.k_full[k_ring.at].wait(k_ring.parity);
      take_turn();
      issue_scores();
      pass_turn();
      retire_store();  // of the previous tile
      ptx::wgmma_wait<0>();
      ptx::pin(s);
      release(shared.k_empty, k_ring);
      weigh(kMasked, n);
      round_probabilities();
      const int keys_in_tile = tile.kv_len - n * kTileK;
      if (p.packed_keys && keys_in_tile < kTileK) {
        shared.v_full[v_ring.at].wait(v_ring.parity);
        clear_rows<C>(shared.v[v_ring.at], keys_in_tile, wg);
      }
      const auto step = [&](auto masked) {  // S of tile n and O of tile n + 1 in flight together
        shared.k_full[k_ring.at].wait(k_ring.parity);
        take_turn();
        issue_scores();
        shared.v_full[v_ring.at].wait(v_ring.parity);
        issue_output();
        pass_turn();
        ptx::wgmma_wait<1>();
        ptx::pin(s);
        release(shared.k_empty, k_ring);
        const bool grew = weigh(masked, n);
        ptx::wgmma_wait<0>();
        ptx::pin(o);
        release(shared.v_empty, v_ring);
        round_probabilities();
        if (grew) {
#pragma unroll
          for (int i = 0; i < kTileD / 2; ++i) o[i] *= o_scale[i / 2 % 2];
        }
      };
      for (--n; n >= max(first, clear_end); --n) step(kMasked);
      for (; n >= max(first, clear_first); --n) step(kClear);
      for (; n >= first; --n) step(kMasked);
      shared.v_full[v_ring.at].wait(v_ring.parity);
      issue_output();
      ptx::wgmma_wait<0>();
      ptx::pin(o);
      release(shared.v_empty, v_ring);
    }

    FinishedRow done[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      rows.sum[h] += __shfl_xor_sync(~0u, rows.sum[h], 1);
      rows.sum[h] += __shfl_xor_sync(~0u, rows.sum[h], 2);
      done[h] = finish_row(p, tile, thread_row + 8 * h, rows.max[h], rows.sum[h]);
    }
    if (done[0].zero || done[1].zero) {
#pragma unroll
      for (int i = 0; i < kTileD / 2; ++i) o[i] = done[i / 2 % 2].zero ? 0 : o[i];
    }
    // O through Q's buffer, once all four warps are done with Q. Lane 8 i + j names row j of tile i of 8 x 8 values;
    // tiles are rows 0-7 and 8-15 of columns 0-7, then of columns 8-15.
    ptx::named_barrier_sync(C::warpgroup_barrier(wg), 128);
    auto& staged = shared.q[q_ring.at][wg];
    const int late_lane = ptx::fresh_lane();  // eight swizzled addresses, not to be kept over the main loop
    const uint32_t staged_row = ptx::shared_address(staged) + (warp_row + late_lane % 16) * 128;
#pragma unroll
    for (int c = 0; c < kTileD / 16; ++c) {
      const float* x = &o[8 * c];
      const int chunk = 2 * c + late_lane / 16;  // of 16 bytes
      ptx::stmatrix_x4(staged_row + chunk / 8 * sizeof staged[0] + (chunk ^ late_lane) % 8 * 16,
                       ptx::pack<Element>(x[0] * done[0].scale, x[1] * done[0].scale),
                       ptx::pack<Element>(x[2] * done[1].scale, x[3] * done[1].scale),
                       ptx::pack<Element>(x[4] * done[0].scale, x[5] * done[0].scale),
                       ptx::pack<Element>(x[6] * done[1].scale, x[7] * done[1].scale));
    }
    // The number of visible keys is least at an end of the rows.
    const auto keys_of = [&](int row) {
      const Keys keys = visible_keys(p.schedule, tile, row >> p.schedule.pack_log2);
      return keys.end - keys.begin;
    };
    if (min(keys_of(row0), keys_of(row0 + C::kRows - 1)) <= 1) {
      __syncwarp();
      const bool ordinary[2] = {rows.sum[0] > 0, rows.sum[1] > 0};
      copy_lone_values(p, tile, row0 + warp_row, ordinary, reinterpret_cast<uint4*>(staged) + warp_row * 8,
                       C::kRows * 8);
    }
    const int token = row0 >> p.schedule.pack_log2;
    const bool whole = !p.schedule.plan || (row0 + C::kRows) >> p.schedule.pack_log2 <= tile.q_len;
    ptx::fence_async_proxy();  // of the stores above: TMA reads the buffer, or fills it again
    ptx::named_barrier_sync(C::warpgroup_barrier(wg), 128);
    if (!whole) {
      store_rows<C>(p, tile, row0, staged);
      ptx::named_barrier_sync(C::warpgroup_barrier(wg), 128);
    } else if (leader && token < tile.q_len) {
#pragma unroll
      for (int box = 0; box < C::kBoxes; ++box)
        ptx::tma_store(p.out, {box * 64, 0, tile.q_begin + token, tile.head, tile.batch}, staged[box]);
      ptx::tma_store_commit();
    }
    unread = &shared.q_empty[q_ring.at][wg];
    q_ring.advance();
    if constexpr (C::kQStages == 1) retire_store();
    __syncwarp();
    if (lane == 0) shared.tile_empty[slots.at].arrive();
    slots.advance();
  }
}

}  // namespace flashq::cuda::sm90
