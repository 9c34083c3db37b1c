// The producer warps: one streams K, one V, one loads Q, one finds tiles.
#pragma once
#include "cuda/prefill_sm90/schedule.cuh"
#include "cuda/ptx/dependent_launch.cuh"
#include "cuda/ptx/tma.cuh"

namespace flashq::cuda::sm90 {

// The box of keys that a lane copies of each key tile, from a tile's last one down. A page is loaded a tile ahead, and
// nothing is done with it before, so that nobody waits for it.
class BoxOfKeys {
 public:
  template <class C> __device__ __forceinline__ void start(const Pages& pages, const Tile& tile, int n) {
    const int row = static_cast<int>(threadIdx.x % 32) * pages.box;
    key_ = row < C::kTileK ? n * C::kTileK + row : -1;
    page_ = key_ / pages.size;
    slot_ = key_ - page_ * pages.size;
    look_up(pages, tile);
  }
  // Takes what was looked up last, and looks up the page of the next tile.
  template <class C> __device__ __forceinline__ void advance(const Pages& pages, const Tile& tile) {
    now_ = next_;
    wanted_ = next_wanted_;
    slot = slot_;
    key_ -= C::kTileK;
    page_ -= pages.tile_pages;
    slot_ -= pages.tile_slots;
    if (slot_ < 0) {
      slot_ += pages.size;
      --page_;
    }
    look_up(pages, tile);
  }
  // What to copy: page -1, which is zeros, where no key is visible or no such page exists.
  __device__ __forceinline__ int page(const Pages& pages) const {
    return found(pages) ? static_cast<int>(now_.low) : -1;
  }
  int slot;
  __device__ __forceinline__ bool missing(const Pages& pages) const { return wanted_ && !found(pages); }

 private:
  struct Entry { uint32_t low, high; };

  __device__ __forceinline__ bool found(const Pages& pages) const {
    return wanted_ && now_.high == 0 && now_.low < static_cast<uint32_t>(pages.count);
  }
  __device__ __forceinline__ void look_up(const Pages& pages, const Tile& tile) {
    next_wanted_ = key_ >= 0 && key_ + pages.box > tile.seen && key_ < tile.kv_len;
    if (!next_wanted_) return;
    const int64_t at = tile.sequence * pages.table.stride[0] + page_ * pages.table.stride[1];
    const auto* entry = static_cast<const uint32_t*>(pages.table.data) + (pages.table.is_int64 ? 2 * at : at);
    next_.low = entry[0];
    next_.high = pages.table.is_int64 ? entry[1] : 0;
  }

  int key_, page_, slot_;
  Entry now_, next_;
  bool wanted_, next_wanted_;
};

// One thread: finds the next tile while the others are at work on the last one. Some 2000 cycles of index arithmetic
// and an atomic; in the thread that streams keys they would stall everybody (3 % on sequences of 8192).
template <class C> __device__ __forceinline__ void produce_tiles(const Params& p, typename C::SharedMemory& shared) {
  ptx::Ring<C::kTileSlots> slots;
  const int ctas = static_cast<int>(gridDim.x), cta = static_cast<int>(blockIdx.x);
  if (p.schedule.plan) ptx::wait_for_primary();
  uint32_t draw_parity = 0;
  find_tile<C>(p.schedule, cta, shared.tile[0]);
  ptx::wait_for_primary();  // the counter is not zeroed before
  for (int round = 1;; ++round) {
    const bool last = shared.tile[slots.at].row == kNoTile;
    shared.tile_full[slots.at].arrive();
    if (last) return;
    slots.advance();
    if (p.schedule.drawn) {  // late: who is slow must not hold a tile that another CTA could have
      shared.may_draw.wait(draw_parity);
      draw_parity ^= 1;
      shared.tile_empty[slots.at].wait(slots.parity ^ 1);
      find_tile<C>(p.schedule, ctas + atomicAdd(p.schedule.drawn, 1), shared.tile[slots.at]);
    } else {
      // There and back again: who has the longest of one round has the shortest of the next. Then half a turn further,
      // because the longest with the shortest take more time than two between them (3 % on sequences of 512).
      const int place = (cta + round / 2 % 2 * (ctas / 2)) % ctas;
      find_tile<C>(p.schedule, round * ctas + (round % 2 ? ctas - 1 - place : place), shared.later_tile);
      shared.tile_empty[slots.at].wait(slots.parity ^ 1);
      shared.tile[slots.at] = shared.later_tile;
    }
  }
}

// Streams K or V: one warp, or one thread where there is no page table. Key tiles run from the last one down.
template <class C, bool kValues>
__device__ __forceinline__ void produce_keys(const Params& p, typename C::SharedMemory& shared) {
  constexpr int kDrawAhead = 3;  // key tiles before the end, the next tile may be drawn
  const int lane = static_cast<int>(threadIdx.x % 32);
  const bool paged = C::kGeneral && p.pages.table.given();
  if (!paged && lane > 0) return;
  auto& stages = kValues ? shared.v : shared.k;
  const CUtensorMap& map = kValues ? p.v : p.k;
  ptx::Ring<C::kStages> ring;
  ptx::Ring<C::kTileSlots> slots;
  BoxOfKeys box;
  while (true) {
    shared.tile_full[slots.at].wait(slots.parity);
    const Tile& tile = shared.tile[slots.at];
    if (tile.row == kNoTile) return;
    const int first = tile.first, end = tile.end, kv_head = tile.head / p.schedule.packs_per_kv;
    const int batch = tile.sequence * (kValues ? p.v_batch_step : p.k_batch_step), k_begin = tile.k_begin;
    if (paged && end > first) box.start<C>(p.pages, tile, end - 1);
    const auto let_draw = [&] {  // K decides when the next tile may be drawn
      if (lane == 0) shared.may_draw.arrive();
    };
    if (!kValues && end - first <= kDrawAhead) let_draw();
    for (int n = end - 1; n >= first; --n) {
      ptx::Barrier& arrived = (kValues ? shared.v_full : shared.k_full)[ring.at];
      ptx::Barrier& empty = (kValues ? shared.v_empty : shared.k_empty)[ring.at];
      if (paged) {
        box.advance<C>(p.pages, tile);
        const unsigned lanes = kValues ? 0 : __ballot_sync(~0u, box.missing(p.pages));
        empty.wait(ring.parity ^ 1);
        if (lane == 0) {
          if constexpr (!kValues) {
            uint32_t missing = 0;
            for (unsigned rest = lanes; rest; rest &= rest - 1)
              missing |= ((1u << p.pages.box / 16) - 1) << ((__ffs(static_cast<int>(rest)) - 1) * p.pages.box / 16);
            shared.missing[ring.at] = missing;
          }
          arrived.arrive_expecting(sizeof stages[0]);
        }
        if (const int row = lane * p.pages.box; row < C::kTileK) {
          const int page = box.page(p.pages);
#pragma unroll
          for (int i = 0; i < C::kBoxes; ++i)
            ptx::tma_load(stages[ring.at][i][row], map, {i * 64, 0, box.slot, kv_head, page}, arrived);
        }
        __syncwarp();
      } else {
        empty.wait(ring.parity ^ 1);
        if constexpr (C::kGeneral && !kValues) shared.missing[ring.at] = 0;
        arrived.arrive_expecting(sizeof stages[0]);
#pragma unroll
        for (int i = 0; i < C::kBoxes; ++i)
          ptx::tma_load(stages[ring.at][i], map, {i * 64, 0, k_begin + n * C::kTileK, kv_head, batch}, arrived);
      }
      ring.advance();
      if constexpr (!kValues)
        if (n == first + kDrawAhead) let_draw();
    }
    shared.tile_empty[slots.at].arrive_for(paged ? 1 : 32);
    slots.advance();
  }
}

// One thread.
template <class C> __device__ __forceinline__ void produce_queries(const Params& p, typename C::SharedMemory& shared) {
  ptx::Ring<C::kQStages> q_ring;
  ptx::Ring<C::kTileSlots> slots;
  while (true) {
    shared.tile_full[slots.at].wait(slots.parity);
    const Tile& tile = shared.tile[slots.at];
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
    shared.tile_empty[slots.at].arrive();
    slots.advance();
    q_ring.advance();
  }
}

}  // namespace flashq::cuda::sm90
