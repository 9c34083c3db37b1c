// The warps that fill the buffers of K and V: with codes, or with the rows of the exact pool.
#pragma once
#include "cuda/ptx/fresh_thread.cuh"
#include "cuda/ptx/tma.cuh"
#include "cuda/tbq4_prefill/exact_keys.cuh"
#include "cuda/tbq4_prefill/expand.cuh"

namespace flashq::cuda::tbq4_sm90 {

template <class C> class Expander {
 public:
  __device__ __forceinline__ Expander(const Params& p, typename C::SharedMemory& shared)
      : p_(p),
        shared_(shared),
        warp_(__shfl_sync(~0u, static_cast<int>(threadIdx.x) / 32 - (C::kProducers - C::kExpanders), 0)),
        levels_(p.levels),
        place_(place_in_unit<C>(ptx::fresh_lane())) {
    for (int i = 0; i < 2; ++i) asm volatile("" : "+r"(levels_.low[i]), "+r"(levels_.high[i]));  // in registers
  }

  __device__ __forceinline__ void run() {
    while (true) {
      shared_.tile_full[tiles_.at()].wait(tiles_.parity());
      const Tile& tile = shared_.tile[tiles_.at()];
      if (tile.row == sm90::kNoTile) return;
      for (int n = tile.end - 1; n >= tile.first; --n) produce();
      if (p_.exact && tile.first < tile.end) produce_exact_tiles(tile);
      __syncwarp();
      if (ptx::fresh_lane() == 0) shared_.tile_empty[tiles_.at()].arrive();
      tiles_.advance();
    }
  }

 private:
  // Ends what this warp writes to a buffer.
  __device__ __forceinline__ void publish(ptx::Barrier& full) const {
    ptx::fence_async_proxy();
    __syncwarp();
    if (ptx::fresh_lane() == 0) full.arrive();
  }
  template <class Ring> __device__ __forceinline__ void acquire(ptx::Barrier* empty, const Ring& ring) const {
    empty[ring.at()].wait(ring.parity() ^ 1);
  }
  // Until the next tile is described. Returns where.
  __device__ __forceinline__ int await_info() {
    const auto place = rings_.info();
    shared_.info_full[place.at()].wait(place.parity());
    rings_.advance_info();
    return place.at();
  }
  __device__ __forceinline__ void publish_keys() {
    publish(shared_.k_full[rings_.k().at()]);
    rings_.advance_k();
  }

  // function(unit) for this warp's units of a tile.
  __device__ __forceinline__ void for_each_unit(int first, const auto& function) const {
#pragma unroll 1
    for (int unit = first; unit < C::kUnits; unit += C::kExpanders) function(unit);
  }
  __device__ __forceinline__ void expand(const typename C::RawTile& raw, const void* buffer, int first) const {
    const uint32_t tile = ptx::shared_address(buffer);
    for_each_unit(first, [&](int unit) { expand_unit<C>(levels_, raw, tile, unit, place_); });
  }

  // A tile of codes.
  __device__ __forceinline__ void produce() {
    const uint32_t flags = shared_.info[await_info()].flags;
    shared_.raw_full[raw_ring_.at].wait(raw_ring_.parity);
    const auto& raw = shared_.raw[raw_ring_.at];
    acquire(shared_.k_empty, rings_.k());
    if (flags & kRest) {
      const uint32_t tile = ptx::shared_address(shared_.k[rings_.k().at()]);
      for_each_unit(warp_, [&](int unit) { expand_rest<C>(levels_, raw.k, tile, unit, place_); });
      publish_keys();
      acquire(shared_.k_empty, rings_.k());
    }
    expand(raw.k, shared_.k[rings_.k().at()], warp_);
    publish_keys();

    const auto values = rings_.v(1);
    acquire(shared_.v_empty, values);
    constexpr int kStart = C::kUnits % C::kExpanders;  // where K ended, so that warps have as many
    expand(raw.v, shared_.v[values.at()], warp_ < kStart ? warp_ + C::kExpanders - kStart : warp_ - kStart);
    publish(shared_.v_full[values.at()]);
    if (ptx::fresh_lane() == 0) shared_.raw_empty[raw_ring_.at].arrive();
    raw_ring_.advance();
  }

  // Tiles of keys of the exact pool: what fp16 holds of the rotated rows, and of keys, in a buffer ahead, the rest.
  __device__ __forceinline__ void produce_exact_tiles(const Tile& tile) {
    ExactKeys(p_, tile).template tiles<C>(p_, tile).for_each([&](int n, bool) {
      const ExactRows<C> rows(p_, tile, n, warp_);
      const int at = await_info();
      acquire(shared_.k_empty, rings_.k());
      float top = 0x1p-24f;
      rows.for_each([&](int key, bool there) {
        const auto row = rows.load_row(p_.call.kv.exact.k, p_.call.kv.exact.k_stride, key, there);
        rows.store_row(shared_.k[rings_.k().at()], key, row.parts.rest);
        const float v_unit = rows.load_row(p_.call.kv.exact.v, p_.call.kv.exact.v_stride, key, there).unit;
        top = fmaxf(top, v_unit);
        if (ptx::fresh_lane() % ExactRows<C>::kLanes == 0) {
          shared_.info[at].k_norm[key % 8 / 2][key / 8 * 2 + key % 2] = row.unit;
          shared_.info[at].v_norm[key % 8 / 2][key / 8 * 2 + key % 2] = v_unit;
        }
      });
      top = __log2f(float_of(__reduce_max_sync(~0u, bits_of(top))));
      if (ptx::fresh_lane() == 0) shared_.info[at].v_top[warp_] = top;
      publish_keys();
      acquire(shared_.k_empty, rings_.k());
      rows.for_each([&](int key, bool there) {
        rows.store_row(shared_.k[rings_.k().at()], key,
                       rows.load_row(p_.call.kv.exact.k, p_.call.kv.exact.k_stride, key, there).parts.high);
      });
      publish_keys();
      const auto values = rings_.v(1);
      acquire(shared_.v_empty, values);
      rows.for_each([&](int key, bool there) {
        rows.store_row(shared_.v[values.at()], key,
                       rows.load_row(p_.call.kv.exact.v, p_.call.kv.exact.v_stride, key, there).parts.high);
      });
      publish(shared_.v_full[values.at()]);
    });
  }

  const Params& p_;
  typename C::SharedMemory& shared_;
  const int warp_;
  LevelBytes levels_;
  const UnitPlace place_;
  typename C::Rings rings_;
  ptx::Ring<C::kRawStages> raw_ring_;
  TilePosition tiles_;
};

}  // namespace flashq::cuda::tbq4_sm90
