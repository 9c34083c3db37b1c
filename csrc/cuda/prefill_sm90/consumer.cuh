// A consumer warpgroup: 64 query rows, from Q, K and V in shared memory to O and its lse in global memory.
#pragma once
#include "cuda/prefill_sm90/finish_tile.cuh"
#include "cuda/ptx/wgmma.cuh"

namespace flashq::cuda::sm90 {

// Zeros rows [begin, end) of a V tile: a weight of 0 does not cancel the NaN that somebody else may hold there. By a
// whole warpgroup; the others write the same zeros for themselves, which takes no barrier among them.
template <class C>
__device__ __forceinline__ void clear_rows(void* v_tile, int begin, int end, int warpgroup) {
  constexpr int kBoxChunks = C::kTileK * 8;
  for (int i = begin * 8 + ptx::fresh_thread() % 128; i < end * 8; i += 128)
#pragma unroll
    for (int box = 0; box < C::kBoxes; ++box) static_cast<uint4*>(v_tile)[box * kBoxChunks + i] = uint4{};
  ptx::fence_async_proxy();
  ptx::named_barrier_sync(C::warpgroup_barrier(warpgroup), 128);
}

template <class C> __device__ __forceinline__ void consume(const Params& p, typename C::SharedMemory& shared) {
  using Element = typename C::Element;
  constexpr int kTileK = C::kTileK, kTileD = C::kTileD;
  const int wg = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / 128 - 1, 0);
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const bool leader = threadIdx.x % 128 == 0;  // of the warpgroup
  const uint64_t q_descriptor = ptx::matrix_descriptor(&shared.q[0][wg], 16);
  const uint64_t k_descriptor = ptx::matrix_descriptor(&shared.k, 16);
  const uint64_t v_descriptor = ptx::matrix_descriptor(&shared.v, sizeof shared.v[0][0]);

  float s[kTileK / 2], o[kTileD / 2];  // S and O, 64 x kTileK and 64 x kTileD
  uint32_t prob[kTileK / 16][4];       // P in 16 bits
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
  const auto release = [&](ptx::Barrier* empty, ptx::Ring<C::kStages>& ring) {
    if (lane == 0) empty[ring.at].arrive();
    ring.advance();
  };
  int unread = -1;  // the Q buffer whose O the TMA may still be reading
  const auto retire_store = [&] {
    if (leader && unread >= 0) {
      ptx::tma_store_wait_read();
      shared.q_empty[unread][wg].arrive();
    }
    unread = -1;
  };
  const auto take_turn = [&] {
    if constexpr (C::kPingPong) ptx::named_barrier_sync(C::turn_barrier(wg), 256);
  };
  const auto pass_turn = [&] {
    if constexpr (C::kPingPong) ptx::named_barrier_arrive(C::turn_barrier((wg + 1) % C::kConsumers), 256);
  };
  if (wg == C::kConsumers - 1) pass_turn();  // warpgroup 0 starts

  // Where Q has two buffers, S of a tile's first keys is under way while the rows of the tile before are finished
  // (with a scheduler thread +1 to 2 %). It is issued whatever comes, because the compiler would wait for products that
  // only some paths issue: without a tile, or keys, it is of anything.
  constexpr bool kStartEarly = C::kStartEarly;
  const auto await_first_keys = [&] {
    if (const Tile& next = shared.tile[slots.at]; next.row != kNoTile && next.first < next.end) {
      shared.q_full[q_ring.at][wg].wait(q_ring.parity);
      shared.k_full[k_ring.at].wait(k_ring.parity);
    }
  };

  shared.tile_full[0].wait(0);
  if constexpr (kStartEarly) {
    await_first_keys();
    take_turn();
    issue_scores();
    pass_turn();
  }
  while (true) {
    if constexpr (kStartEarly) {
      ptx::wgmma_wait<0>();
      ptx::pin(s);
    }
    const int slot = slots.at;
    const Tile& tile = shared.tile[slot];
    if (tile.row == kNoTile) return retire_store();
    const int row0 = tile.row + wg * C::kRows, first = tile.first, end = tile.end;
    // Key tiles [clear_first, clear_end) are visible to all rows of this warpgroup.
    const int clear_first =
        (visible_keys(p.schedule, tile, (row0 + C::kRows - 1) >> p.schedule.pack_log2).begin + kTileK - 1) / kTileK;
    const int clear_end = max(0, visible_keys(p.schedule, tile, row0 >> p.schedule.pack_log2).end) / kTileK;
#pragma unroll
    for (int i = 0; i < kTileD / 2; ++i) o[i] = 0;
    rows = {{-kInf, -kInf}, {0, 0}};

    // S to P. missing: as SharedMemory::missing, of key tile n. then(): before P is written. rescale(factors): O.
    const auto weigh = [&](auto masked, int n, uint32_t missing, const auto& then, const auto& rescale) {
      const auto grew = [&](int h, float largest) {  // false while both are -inf
        return largest * p.scale_log2 > rows.max[h] * p.scale_log2 + kLazyGrowth;
      };
      const Transform transform = C::kGeneral ? p.transform : Transform::kNone;
      if (C::kSkipsMaxima && !masked.value && !missing && transform == Transform::kNone) {
        const auto none = [](int) { return false; };
        bool bad[2];
        const Plain rule{p.scale_log2};
        if (softmax_alike<Element, C::kAhead>(s, rows, p.scale_log2, rule, prob, bad, none, then)) return;
        if (C::kAhead > 0 && softmax_alike<Element, 0>(s, rows, p.scale_log2, rule, prob, bad, none, [] {})) return;
        // As each row would alone, whatever the others of its warp do.
        const auto of_row = [&](int h) { return __ballot_sync(~0u, bad[h]) >> (ptx::fresh_lane() & 28) & 15; };
        const bool row_bad[2] = {of_row(0) != 0, of_row(1) != 0};
        const auto moves = [&](int h, float largest) { return row_bad[h] && largest > rows.max[h]; };
        return softmax<Element, true>(s, rows, p.scale_log2, prob, moves, then, rescale);
      }
      if constexpr (C::kGeneral) {
        if (transform == Transform::kCap) {
          if (C::kSkipsMaxima && !masked.value && !missing && p.cap.largest_square >= 0) {
            // Rows past the sequence's end have no say: results must not depend on what lies there.
            const auto ignored = [&](int h) {
              const int row = row0 + row_of_thread(static_cast<unsigned>(ptx::fresh_thread())) + 8 * h;
              return row >= tile.q_len << p.schedule.pack_log2;
            };
            bool bad[2];
            if (softmax_alike<Element, C::kCappedAhead>(s, rows, p.scale_log2, HardlyCapped{p.cap}, prob, bad, ignored,
                                                        then))
              return;
          }
#pragma unroll
          for (float& x : s) x = ptx::tanh_approx(x * p.cap.multiplier);
        } else if (transform == Transform::kMultiply) {
#pragma unroll
          for (float& x : s) x *= p.cap.multiplier;
        }
      }
      if (masked.value || missing) {
        const uint32_t there = ~columns_missing(missing);
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const unsigned thread = ptx::fresh_thread();
          const int row = row0 + row_of_thread(thread) + 8 * h;
          const Keys keys = visible_keys(p.schedule, tile, row >> p.schedule.pack_log2);
          const int left = n * kTileK + static_cast<int>(thread % 4 * 2);
          mask_row(s, h, columns_in(keys.begin - left, keys.end - left) & there);
        }
      }
      constexpr bool kMayBeEmpty = masked.value || C::kGeneral;
      softmax<Element, kMayBeEmpty>(s, rows, p.scale_log2, prob, grew, then, rescale);
    };
    bool found_all = true;
    const auto take_missing = [&] {
      uint32_t missing = 0;
      if constexpr (C::kGeneral) {  // read by the lane that gives the buffer back, whose reads racecheck can order
        if (lane == 0) missing = shared.missing[k_ring.at];
        missing = __shfl_sync(~0u, missing, 0);
      }
      if (missing) found_all = false;
      return missing;
    };
    constexpr std::true_type kMasked;
    constexpr std::false_type kClear;

    const int staged_at = q_ring.at;
    if (kStartEarly ? first == end : true) shared.q_full[q_ring.at][wg].wait(q_ring.parity);
    if (first == end) {
      if constexpr (!kStartEarly) retire_store();
    } else {
      int n = end - 1;
      if constexpr (!kStartEarly) {
        shared.k_full[k_ring.at].wait(k_ring.parity);
        take_turn();
        issue_scores();
        pass_turn();
        retire_store();  // of the previous tile
        ptx::wgmma_wait<0>();
        ptx::pin(s);
      }
      const uint32_t missing = take_missing();
      release(shared.k_empty, k_ring);
      weigh(kMasked, n, missing, [] {}, [](const float (&)[2]) {});
      if (const int last = tile.kv_len - n * kTileK; p.shared_keys && last < kTileK) {
        shared.v_full[v_ring.at].wait(v_ring.parity);
        clear_rows<C>(shared.v[v_ring.at], last, kTileK, wg);
      }
      const auto step = [&](auto masked) {  // S of tile n and O of tile n + 1 in flight together
        shared.k_full[k_ring.at].wait(k_ring.parity);
        take_turn();
        issue_scores();
        shared.v_full[v_ring.at].wait(v_ring.parity);
        issue_output();
        pass_turn();
        if constexpr (kStartEarly) retire_store();
        ptx::wgmma_wait<1>();
        ptx::pin(s);
        const uint32_t missing = take_missing();
        release(shared.k_empty, k_ring);
        const auto then = [&] {
          ptx::wgmma_wait<0>();
          ptx::pin(o);
        };
        weigh(masked, n, missing, then, [&](const float (&factors)[2]) {
#pragma unroll
          for (int i = 0; i < kTileD / 2; ++i) o[i] *= factors[i / 2 % 2];
        });
        release(shared.v_empty, v_ring);
      };
      for (--n; n >= max(first, clear_end); --n) step(kMasked);
      for (; n >= max(first, clear_first); --n) step(kClear);
      for (; n >= first; --n) step(kMasked);
      shared.v_full[v_ring.at].wait(v_ring.parity);
      if constexpr (C::kGeneral) {
        // Keys that nobody sees may be on any page.
        if (const int begin = tile.seen - first * kTileK; begin > 0) clear_rows<C>(shared.v[v_ring.at], 0, begin, wg);
      }
      if constexpr (!kStartEarly) {
        issue_output();
        ptx::wgmma_wait<0>();
        ptx::pin(o);
        release(shared.v_empty, v_ring);
      }
    }
    q_ring.advance();
    slots.advance();
    if constexpr (kStartEarly) {
      take_turn();
      issue_output();
      retire_store();  // here and in step() while products run: it takes some 400 cycles
      shared.tile_full[slots.at].wait(slots.parity);
      await_first_keys();
      issue_scores();
      pass_turn();
      ptx::wgmma_wait<1>();
      ptx::pin(o);
      if (first < end) release(shared.v_empty, v_ring);
    }

    finish_tile<C>(p, tile, wg, shared.q[staged_at][wg], found_all, o, rows);
    unread = staged_at;
    if constexpr (!kStartEarly) {
      retire_store();
      shared.tile_full[slots.at].wait(slots.parity);
    }
    shared.tile_empty[slot].arrive();
  }
}

}  // namespace flashq::cuda::sm90
