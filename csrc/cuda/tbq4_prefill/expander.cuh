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
        warp_(__shfl_sync(~0u, (static_cast<int>(threadIdx.x) / 32 + 2) % C::kExpanders, 0)),
        units_(shared.levels, warp_, static_cast<int>(threadIdx.x) % 32) {}

  __device__ __forceinline__ void run() {
    while (true) {
      shared_.tile_full[tiles_.at()].wait(tiles_.parity());
      const Tile& tile = shared_.tile[tiles_.at()];
      if (tile.row == sm90::kNoTile) return;
      for (int n = tile.end - 1; n >= tile.first; --n) {
        produce_keys();
        if (!kLate)
          produce_values(1);
        else if (n < tile.end - 1)
          produce_values(2);
      }
      if (kLate && tile.first < tile.end) produce_values(1);
      if (p_.exact && tile.first < tile.end) produce_exact_tiles(tile);
      shared_.tile_empty[tiles_.at()].arrive();
      tiles_.advance();
    }
  }

 private:
  // Values are expanded a tile after keys, as they are read, where there is room for the codes of three tiles.
  static constexpr bool kLate = C::kRawStages > 2;

  // Ends what this warp writes to a buffer.
  __device__ __forceinline__ void publish(ptx::Barrier& full) const {
    ptx::fence_async_proxy();
    full.arrive();
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

  // K of a tile of codes.
  __device__ __forceinline__ void produce_keys() {
    const uint32_t flags = shared_.info[await_info()].facts.flags;  // raw_full, too, has been waited for then
    const RingPosition<C::kRawStages> place{tiles_loaded_++};
    const auto& raw = shared_.raw[place.at()];
    const uint4 codes = units_.load_first(raw.k);
    acquire(shared_.k_empty, rings_.k());
    if (flags & kRest) {
      units_.expand_rest(raw.k, ptx::shared_address(shared_.k[rings_.k().at()]));
      publish_keys();
      acquire(shared_.k_empty, rings_.k());
    }
    units_.template expand<false>(raw.k, codes, ptx::shared_address(shared_.k[rings_.k().at()]));
    publish_keys();
  }
  // V of the tile `before` the next one.
  __device__ __forceinline__ void produce_values(uint32_t before) {
    const auto values = rings_.v(before);
    const RingPosition<C::kRawStages> place{tiles_loaded_ - before};
    const auto& raw = shared_.raw[place.at()].v;
    const uint4 codes = units_.load_first(raw);
    acquire(shared_.v_empty, values);
    units_.template expand<true>(raw, codes, ptx::shared_address(shared_.v[values.at()]));
    publish(shared_.v_full[values.at()]);
    shared_.raw_empty[place.at()].arrive();
  }

  // Tiles of keys of the exact pool: what fp16 holds of the rotated rows, and of keys, in a buffer ahead, the rest.
  __device__ __forceinline__ void produce_exact_tiles(const Tile& tile) {
    ExactKeys(p_, tile).template tiles<C>(p_, tile).for_each([&](int n, bool) {
      const ExactRows<C> rows(p_, tile, n, warp_);
      const int at = await_info();
      const auto rest = rings_.k(), values = rings_.v(1);
      rings_.advance_k();
      const auto keys = rings_.k();
      acquire(shared_.k_empty, rest);
      acquire(shared_.k_empty, keys);
      acquire(shared_.v_empty, values);
      const auto leads = [] { return ptx::fresh_lane() % ExactRows<C>::kLanes == 0; };
      rows.for_each_key([&](int key, const auto& row) {
        rows.store_row(shared_.k[rest.at()], key, row.parts.rest);
        rows.store_row(shared_.k[keys.at()], key, row.parts.high);
        if (leads()) shared_.info[at].k_norm[key % 8 / 2][key / 8 * 2 + key % 2] = row.unit * p_.norm_factor;
      });
      float top = kLeastNorm;
      rows.for_each_value([&](int key, const auto& row) {
        auto& info = shared_.info[at];
        const int t = key % 8 / 2, column = key / 8 * 2 + key % 2;
        rows.store_row(shared_.v[values.at()], key, row.parts.high);
        top = fmaxf(top, row.unit);
        if (leads()) info.v_norm[t][column] = row.unit;
        if (row.poison) {
          const int block = C::kBlocks == 1 ? 0 : ptx::fresh_lane() / (C::kWidth / 8);
          atomicOr(&info.poison[block][t], 1u << column);
          atomicOr(&info.facts.flags, kPoison);
        }
      });
      top = float_of(__reduce_max_sync(~0u, bits_of(top)));
      // Of positive numbers the bits have the same order.
      if (ptx::fresh_lane() == 0)
        atomicMin(reinterpret_cast<uint32_t*>(&shared_.info[at].facts.most), bits_of(kMostWeight / top));
      publish(shared_.k_full[rest.at()]);
      publish(shared_.k_full[keys.at()]);
      publish(shared_.v_full[values.at()]);
      rings_.advance_k();
    });
  }

  const Params& p_;
  typename C::SharedMemory& shared_;
  // Those that have a multiprocessor's quarter with a warp that does not expand come first, and get more units: the
  // consumers of all quarters have as little to wait for.
  const int warp_;
  const UnitExpander<C> units_;
  typename C::Rings rings_;
  uint32_t tiles_loaded_ = 0;  // whose K is expanded
  TilePosition tiles_;
};

}  // namespace flashq::cuda::tbq4_sm90
