// The warp that finds tiles of rows and loads codes and norms as they lie in the cache, some tiles of keys ahead.
#pragma once
#include "cuda/ptx/tma.cuh"
#include "cuda/tbq4_prefill/traits.cuh"

namespace flashq::cuda::tbq4_sm90 {

template <class C> class Loader {
 public:
  __device__ __forceinline__ Loader(const Params& p, typename C::SharedMemory& shared)
      : p_(p), shared_(shared), lane_(static_cast<int>(threadIdx.x) % 32) {}

  __device__ __forceinline__ void run() {
    if (lane_ == 0) {
      sm90::find_tile<C>(p_.schedule, static_cast<int>(blockIdx.x), shared_.tile[0]);
      shared_.tile_full[0].arrive();
    }
    while (true) {
      __syncwarp();
      shared_.tile_full[tiles_.at()].wait(tiles_.parity());
      const Tile& tile = shared_.tile[tiles_.at()];
      if (tile.row == sm90::kNoTile) return;
      load_keys(tile);
      shared_.tile_empty[tiles_.at()].arrive();
      tiles_.advance();
      if (lane_ == 0) {
        shared_.tile_empty[tiles_.at()].wait(tiles_.parity() ^ 1);
        const int item = static_cast<int>(gridDim.x) + atomicAdd(p_.schedule.drawn, 1);
        sm90::find_tile<C>(p_.schedule, item, shared_.tile[tiles_.at()]);
        shared_.tile_full[tiles_.at()].arrive();
      }
    }
  }

 private:
  // Starts to look up the page of this lane's group of 16 keys of tile n.
  __device__ __forceinline__ void look_up(int n) {
    group_ = n * C::kTileK + lane_ * 16;
    wanted_ = n >= keys_.first && lane_ < C::kGroups && group_ + 16 > keys_.seen && group_ < keys_.kv_len;
    low_ = keys_.sequence;
    high_ = 0;
    const IndexView& table = p_.call.kv.block_table;
    if (!table.given() || !wanted_) return;
    const int64_t at = keys_.sequence * table.stride[0] + p_.page_size.quotient(group_) * table.stride[1];
    const auto* entry = static_cast<const uint32_t*>(table.data) + (table.is_int64 ? 2 * at : at);
    low_ = entry[0];
    if (table.is_int64) high_ = entry[1];
  }

  __device__ __forceinline__ void load_keys(const Tile& tile) {
    const Tbq4View& kv = p_.call.kv;
    const int kv_head = tile.head / p_.schedule.packs_per_kv;
    keys_ = {tile.first, tile.seen, tile.kv_len, tile.sequence};
    look_up(tile.end - 1);
    for (int n = tile.end - 1; n >= keys_.first; --n) {
      const bool found = wanted_ && high_ == 0 && low_ < static_cast<uint32_t>(kv.num_pages);
      const int page = found ? static_cast<int>(low_) : -1;
      const bool missing = __any_sync(~0u, wanted_ && !found);
      const uint32_t there = __ballot_sync(~0u, found);
      const int size = static_cast<int>(p_.page_size.value);
      const int slot = kv.block_table.given() ? group_ - p_.page_size.quotient(group_) * size : group_;
      const int64_t row = (int64_t{page} * p_.call.query.kv_heads + kv_head) * kv.page_size + slot;
      look_up(n - 1);

      auto& raw = shared_.raw[ring_.at];
      ptx::Barrier& full = shared_.raw_full[ring_.at];
      shared_.raw_empty[ring_.at].wait(ring_.parity ^ 1);
      if (lane_ < C::kGroups) raw.page[lane_] = page;
      if (lane_ == 0) raw.missing = missing;
      __syncwarp();
      constexpr int kCodeBytes = 16 * C::kDim / 2, kNormBytes = 16 * 2 * C::kBlocks;
      if (lane_ == 0)
        full.arrive_expecting(__popc(there) * 2 * (kCodeBytes + kNormBytes));
      else
        full.arrive();
      __syncwarp();
      // Groups that are neighbours on a page are copied together, by the first of them.
      const bool leads = found && (slot == 0 || (there << 1 >> lane_ & 1) == 0);
      const uint32_t ends = (__ballot_sync(~0u, leads) | ~there) >> lane_ >> 1;
      if (leads) {
        const int key = lane_ * 16, groups = __ffs(static_cast<int>(ends));
        ptx::bulk_load(raw.k.codes[key], kv.k_codes + row * (C::kDim / 2), groups * kCodeBytes, full);
        ptx::bulk_load(raw.k.norms[key], kv.k_norms + row * C::kBlocks, groups * kNormBytes, full);
        ptx::bulk_load(raw.v.norms[key], kv.v_norms + row * C::kBlocks, groups * kNormBytes, full);
        ptx::bulk_load(raw.v.codes[key], kv.v_codes + row * (C::kDim / 2), groups * kCodeBytes, full);
      }
      __syncwarp();
      ring_.advance();
    }
  }

  const Params& p_;
  typename C::SharedMemory& shared_;
  const int lane_;
  ptx::Ring<C::kRawStages> ring_;
  TilePosition tiles_;
  uint32_t low_ = 0, high_ = 0;  // the table's entry
  int group_ = 0;
  struct { int first, seen, kv_len, sequence; } keys_ = {};  // of the tile of rows
  bool wanted_ = false;
};

}  // namespace flashq::cuda::tbq4_sm90
