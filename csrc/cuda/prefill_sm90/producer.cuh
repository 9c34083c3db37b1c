// The producer warps: one draws tiles and streams K and V, one loads Q.
#pragma once
#include "cuda/prefill_sm90/schedule.cuh"
#include "cuda/ptx/tma.cuh"

namespace flashq::cuda::sm90 {

// One thread. Key tiles run from the last one down, in the order of use: K, K, V, K, V, ..., V.
template <class C> __device__ __forceinline__ void produce_keys(const Params& p, typename C::SharedMemory& shared) {
  ptx::Ring<C::kStages> k_ring, v_ring;
  ptx::Ring<C::kTileSlots> slots;
  const int ctas = static_cast<int>(gridDim.x), cta = static_cast<int>(blockIdx.x);
  int id = cta, round = 0;
  while (true) {
    const Tile tile = find_tile<C>(p.schedule, id);
    shared.tile_empty[slots.at].wait(slots.parity ^ 1);
    shared.tile[slots.at] = tile;
    shared.tile_full[slots.at].arrive();
    slots.advance();
    if (tile.row == kNoTile) return;

    const int kv_head = tile.head / p.schedule.packs_per_kv;
    const int k_batch = tile.batch * p.k_batch_step, v_batch = tile.batch * p.v_batch_step;
    const auto load = [&](const CUtensorMap& map, auto& stages, ptx::Barrier* full, ptx::Barrier* empty,
                          ptx::Ring<C::kStages>& ring, int batch, int n) {
      empty[ring.at].wait(ring.parity ^ 1);
      full[ring.at].arrive_expecting(sizeof stages[0]);
#pragma unroll
      for (int box = 0; box < C::kBoxes; ++box)
        ptx::tma_load(stages[ring.at][box], map, {box * 64, 0, tile.k_begin + n * C::kTileK, kv_head, batch},
                      full[ring.at]);
      ring.advance();
    };
    if (tile.end > tile.first) load(p.k, shared.k, shared.k_full, shared.k_empty, k_ring, k_batch, tile.end - 1);
    for (int n = tile.end - 1; n > tile.first; --n) {
      load(p.k, shared.k, shared.k_full, shared.k_empty, k_ring, k_batch, n - 1);
      load(p.v, shared.v, shared.v_full, shared.v_empty, v_ring, v_batch, n);
    }
    // As late as possible: whoever is slow must not hold a tile that another could have. Or there and back again, so
    // that who has the longest tile of one round has the shortest of the next.
    ++round;
    id = p.schedule.drawn ? ctas + atomicAdd(p.schedule.drawn, 1) : round * ctas + (round % 2 ? ctas - 1 - cta : cta);
    if (tile.end > tile.first) load(p.v, shared.v, shared.v_full, shared.v_empty, v_ring, v_batch, tile.first);
  }
}

// One thread.
template <class C> __device__ __forceinline__ void produce_queries(const Params& p, typename C::SharedMemory& shared) {
  ptx::Ring<C::kQStages> q_ring;
  ptx::Ring<C::kTileSlots> slots;
  while (true) {
    shared.tile_full[slots.at].wait(slots.parity);
    const Tile tile = shared.tile[slots.at];
    shared.tile_empty[slots.at].arrive();
    slots.advance();
    if (tile.row == kNoTile) return;
#pragma unroll
    for (int w = 0; w < C::kConsumers; ++w) {
      ptx::Barrier& full = shared.q_full[q_ring.at][w];
      shared.q_empty[q_ring.at][w].wait(q_ring.parity ^ 1);
      full.arrive_expecting(sizeof shared.q[0][0]);
      const int token = tile.q_begin + ((tile.row + w * C::kRows) >> p.schedule.pack_log2);
#pragma unroll
      for (int box = 0; box < C::kBoxes; ++box)
        ptx::tma_load(shared.q[q_ring.at][w][box], p.q, {box * 64, 0, token, tile.head, tile.batch * p.q_batch_step},
                      full);
    }
    q_ring.advance();
  }
}

}  // namespace flashq::cuda::sm90
