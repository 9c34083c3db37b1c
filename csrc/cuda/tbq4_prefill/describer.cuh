// The warp that loads queries and says what the keys of a tile are: norms as factors, who reads what, what is rare.
#pragma once
#include "cuda/ptx/cp_async.cuh"
#include "cuda/ptx/tma.cuh"
#include "cuda/tbq4_attention/offsets.cuh"
#include "cuda/tbq4_attention/scores.cuh"
#include "cuda/tbq4_prefill/norms.cuh"

namespace flashq::cuda::tbq4_sm90 {

template <class C> class Describer {
  static constexpr int kLaneKeys = C::kLaneKeys, kNormWords = kLaneKeys * C::kBlocks / 2;
  using Norms = LaneNorms<C>;
  static constexpr int kChunks = C::kDim / 8;  // of 16 bytes, of a row

 public:
  __device__ __forceinline__ Describer(const Params& p, typename C::SharedMemory& shared)
      : p_(p), shared_(shared), lane_(static_cast<int>(threadIdx.x) % 32) {}

  __device__ __forceinline__ void run() {
    while (true) {
      shared_.tile_full[tiles_.at()].wait(tiles_.parity());
      const Tile& tile = shared_.tile[tiles_.at()];
      if (tile.row == sm90::kNoTile) return;
      if (tile.first < tile.end) {
        describe_tiles(tile);
        tiles_.advance_q();
      }
      shared_.tile_empty[tiles_.at()].arrive();
      tiles_.advance();
    }
  }

 private:
  // Q of both warpgroups.
  __device__ __forceinline__ void load_queries(const Tile& tile) {
    __syncwarp();
    if (lane_ > 0) return;
#pragma unroll 1
    for (int w = 0; w < C::kConsumers; ++w) {
      shared_.q_empty[w].wait(tiles_.q_parity() ^ 1);
      shared_.q_full[w].arrive_expecting(sizeof shared_.q[0] * (C::kOffsets ? 2 : 1));
      const int token =
          tile.batch * p_.schedule.q_len + tile.q_begin + ((tile.row + w * C::kRows) >> p_.schedule.pack_log2);
#pragma unroll
      for (int box = 0; box < C::kBoxes; ++box) {
        ptx::tma_load(shared_.q[w][box], p_.q, {box * 64, 0, token, tile.head, 0}, shared_.q_full[w]);
        if constexpr (C::kOffsets)
          ptx::tma_load(shared_.raw_q[w][box], p_.raw_q, {box * 64, 0, token, tile.head, 0}, shared_.q_full[w]);
      }
    }
  }

  // Of all rows: the largest reach, and whether their scores are products times norms, but for page offsets.
  struct Rows {
    float reach;
    bool plain;
  };
  __device__ __forceinline__ Rows examine_rows(const Tile& tile) const {
    uint32_t top = 0;
    bool plain = !p_.general;
#pragma unroll 1
    for (int i = lane_; i < C::kTileQ; i += 32) {
      const int row = tile.row + i, query = row >> p_.schedule.pack_log2;
      if (query >= tile.q_len) break;
      const int head = (tile.head << p_.schedule.pack_log2) + row - (query << p_.schedule.pack_log2);
      const RowScale scale = p_.rows[row_of(p_, tile, query, head)];
      // Of nonnegative numbers the bits have the same order; NaN is above all.
      top = max(top, bits_of(scale.reach) & 0x7fffffff);
      plain &= scale.factors.scores == 1;
    }
    __syncwarp();
    return {float_of(__reduce_max_sync(~0u, top)), __all_sync(~0u, plain) != 0};
  }

  // Which of this lane's keys are read as codes by some row, and which the pool has; by bit.
  struct LaneKeys { uint32_t there, held; };
  // `paged`: the lane's keys are on some page, and read as codes unless the pool has them.
  __device__ __forceinline__ LaneKeys find_keys(const Tile& tile, int n, bool paged) const {
    const int first = n * C::kTileK + lane_ * kLaneKeys;
    if (lane_ >= C::kTileK / kLaneKeys) return {0, 0};
    const auto below = [&](int key) { return (1u << min(max(key - first, 0), kLaneKeys)) - 1; };
    const uint32_t seen = below(kv_len_) & ~below(seen_);
    LaneKeys found{paged ? seen : 0, 0};
    if (!p_.exact) return found;
    const ExactKeys exact(p_, tile);
    const int last_query = min((tile.row + C::kTileQ - 1) >> p_.schedule.pack_log2, tile.q_len - 1);
    if (n * C::kTileK >= exact.lead_end && (n + 1) * C::kTileK <= exact.recent_begin(tile.row >> p_.schedule.pack_log2))
      return found;
#pragma unroll
    for (int i = 0; i < kLaneKeys; ++i)
      found.held |= static_cast<uint32_t>(find_in_pool(p_, tile, first + i).page >= 0) << i & seen;
    // Nobody reads the codes of keys that all rows read there.
    const uint32_t exactly = below(exact.lead_end) | ~below(exact.recent_begin(last_query));
    found.there &= ~(found.held & exactly);
    return found;
  }

  // Bits of the lanes' keys in the order of a thread's columns.
  __device__ __forceinline__ uint32_t gather(uint32_t keys, int t) const {
    uint32_t mine = 0;
#pragma unroll
    for (int i = 0; i < kLaneKeys; ++i) {
      const int key = lane_ * kLaneKeys + i;
      if (key % 8 / 2 == t) mine |= (keys >> i & 1) << (key / 8 * 2 + key % 2);
    }
    return __reduce_or_sync(~0u, mine);
  }
  // What of a tile does not depend on norms.
  __device__ __forceinline__ void write_keys(KeyTile<C::kTileK>& info, int first, uint32_t flags, float most,
                                             float unit, const LaneKeys& keys) const {
    // Consumers look at them only where some row does not see all, or some value is NaN.
    if ((flags & (kFinish | kPoison)) != 0 && (p_.exact || flags & kIncomplete)) {
#pragma unroll 1
      for (int t = 0; t < 4; ++t) {
        const uint32_t there = gather(keys.there, t), held = gather(keys.held, t);
        if (lane_ == 0) {
          info.there[t] = there;
          info.held[t] = held;
        }
      }
    }
    if (lane_ == 0) info.facts = {flags, first, most, __log2f(unit)};
  }
  __device__ __forceinline__ void write_poison(KeyTile<C::kTileK>& info, const uint32_t (&poison)[C::kBlocks]) const {
#pragma unroll 1
    for (int t = 0; t < 4; ++t) {
#pragma unroll
      for (int block = 0; block < C::kBlocks; ++block) {
        const uint32_t columns = gather(poison[block], t);
        if (lane_ == 0) info.poison[block][t] = columns;
      }
    }
  }
  __device__ __forceinline__ void write_norms(float (&to)[4][KeyTile<C::kTileK>::kRow],
                                              const float (&norms)[kLaneKeys]) const {
    if (lane_ >= C::kTileK / kLaneKeys) return;
#pragma unroll
    for (int i = 0; i < kLaneKeys; i += 2) {
      const int key = lane_ * kLaneKeys + i;
      store(&to[key % 8 / 2][key / 8 * 2], float2{norms[i], norms[i + 1]});
    }
  }
  // This lane's norms of a tile as it lies in the cache. Factors of its values take their place.
  __device__ __forceinline__ void load_norms(const typename C::RawTile& raw, int key, Norms& norms) const {
    const auto* const words = reinterpret_cast<const uint32_t*>(raw.norms[key]);
#pragma unroll
    for (int i = 0; i < kNormWords; ++i) norms[i] = words[i];
  }
  __device__ __forceinline__ void return_norms(typename C::RawTile& raw, int key, const Norms& norms) const {
    __syncwarp();  // lanes without keys of their own have read those of others
    if (lane_ >= C::kTileK / kLaneKeys) return;
    auto* const words = reinterpret_cast<uint32_t*>(raw.norms[key]);
#pragma unroll
    for (int i = 0; i < kNormWords; ++i) words[i] = norms[i];
  }
  __device__ __forceinline__ void publish_info() {
    shared_.info_full[rings_.info().at()].arrive();
    rings_.advance_info();
  }

  // Starts to load the page offsets of a tile: one row for each group of 16 keys.
  __device__ __forceinline__ void load_offsets(const int (&pages)[C::kGroups]) const {
    const Tbq4View& kv = p_.call.kv;
    if constexpr (C::kOffsetStages < C::kInfoStages) {  // until the consumers are done with what is there
      const RingPosition<C::kInfoStages> last{rings_.info().count - C::kOffsetStages};
      shared_.info_empty[last.at()].wait(last.parity());
    }
    auto& boxes = shared_.offsets[rings_.offsets().at()];
    const uint16_t* const of_head = kv.k_offsets + kv_head_ * kv.k_offsets_stride[1];
#pragma unroll 1
    for (int i = lane_; i < C::kGroups * kChunks; i += 32) {
      const int group = i / kChunks, chunk = i % kChunks, page = pages[group];
      const uint16_t* const from = of_head + page * kv.k_offsets_stride[0] + chunk * 8;
      char* const to = reinterpret_cast<char*>(boxes[chunk / 8][group]) + (chunk % 8 ^ group) * 16;
      if (p_.wide_offsets)
        ptx::cp_async_16(ptx::shared_address(to), from, page >= 0);
      else
        store(to, load_eight(from, page >= 0, false));
    }
    ptx::cp_async_commit();
  }

  __device__ __forceinline__ void describe_tiles(const Tile& tile) {
    seen_ = tile.seen;
    kv_len_ = tile.kv_len;
    const ExactKeys exact(p_, tile);
    const Rows rows = examine_rows(tile);
    // Keys in [clear_begin, clear_end) are read by all rows, and as codes.
    const int last_query = (tile.row + C::kTileQ - 1) >> p_.schedule.pack_log2,
              first_query = tile.row >> p_.schedule.pack_log2;
    const int clear_begin = max(sm90::visible_keys(p_.schedule, tile, last_query).begin, exact.lead_end),
              clear_end = rows.plain ? min(sm90::visible_keys(p_.schedule, tile, first_query).end,
                                           exact.recent_begin(first_query))
                                     : clear_begin;
    const int last_tile = exact.template tiles<C>(p_, tile).any() ? -1 : tile.first;  // no flag: predicates are few
    kv_head_ = tile.head / p_.schedule.packs_per_kv;
    for (int n = tile.end - 1; n >= tile.first; --n) {
      const int first = n * C::kTileK;
      const bool clear = first >= clear_begin && first + C::kTileK <= clear_end;
      describe(tile, n, rows.reach, (n == last_tile ? kLast : 0) | (clear ? 0 : kFinish));
      if (n == tile.end - 1) {
        load_queries(tile);
        __syncwarp();
      }
    }
    if (last_tile >= 0) return;
    ExactKeys(p_, tile).template tiles<C>(p_, tile).for_each([&](int n, bool last) {
      shared_.info_empty[rings_.info().at()].wait(rings_.info().parity() ^ 1);
      auto& info = shared_.info[rings_.info().at()];
      const LaneKeys keys = find_keys(tile, n, false);
      if (lane_ < 8) info.poison[lane_ / 4][lane_ % 4] = 0;  // expanders add to it
      write_keys(info, n * C::kTileK, kExact | kCoarse | kRest | kFinish | kUneven | (last ? kLast : 0),
                 kMostWeight / kLeastNorm, 1, keys);
      publish_info();
    });
  }

  // A tile of codes.
  __device__ __forceinline__ void describe(const Tile& tile, int n, float reach, uint32_t flags) {
    shared_.raw_full[raw_ring_.at].wait(raw_ring_.parity);
    auto& raw = shared_.raw[raw_ring_.at];
    const int group = min(lane_ * kLaneKeys / 16, C::kGroups - 1), own = min(lane_ * kLaneKeys, C::kTileK - kLaneKeys);
    const LaneKeys keys = find_keys(tile, n, raw.page[group] >= 0);
    shared_.info_empty[rings_.info().at()].wait(rings_.info().parity() ^ 1);
    auto& info = shared_.info[rings_.info().at()];
    if constexpr (C::kOffsets) load_offsets(raw.page);
    float most, unit;
    {
      Norms norms;
      load_norms(raw.v, own, norms);
      uint32_t poison[C::kBlocks] = {}, any = 0;
      take_poison<C>(norms, keys.there, poison);
#pragma unroll
      for (const uint32_t x : poison) any |= x;
      if (__any_sync(~0u, any != 0)) {
        flags |= kPoison;
        write_poison(info, poison);
      }
      Norms shares;
#pragma unroll
      for (int i = 0; i < kNormWords; ++i) shares[i] = norms[i];
      unit = share_unit<C>(shares, keys.there);
      most = kMostWeight / unit;
      if (unit == 0) {
        flags |= kUneven;
        unit = 1;
        float factor[kLaneKeys], top = kLeastNorm;
        finish_norms<C>(norms, keys.there, 1, factor);
        if constexpr (C::kBlocks == 2) {
#pragma unroll
          for (int i = 0; i < kNormWords; ++i) shares[i] = norms[i];
        }
#pragma unroll
        for (const float x : factor) top = fmaxf(top, fabsf(x));
        most = kMostWeight / float_of(__reduce_max_sync(~0u, bits_of(top)));
        write_norms(info.v_norm, factor);
      }
      return_norms(raw.v, own, shares);
    }
    {
      Norms norms;
      load_norms(raw.k, own, norms);
      float factor[kLaneKeys];
      const float longest = finish_norms<C>(norms, keys.there, p_.norm_factor, factor);
      const float largest = float_of(__reduce_max_sync(~0u, bits_of(longest))) * reach;
      if (!(largest <= C::kReachOfQuery)) flags |= kCoarse;
      if (!(largest <= C::kReachOfKeys)) flags |= kRest;
      if constexpr (C::kBlocks == 2) return_norms(raw.k, own, norms);
      write_norms(info.k_norm, factor);
    }
    if (raw.missing) flags |= kIncomplete | kFinish;
    write_keys(info, n * C::kTileK, flags, most, unit, keys);
    if constexpr (C::kOffsets) {
      ptx::cp_async_wait<0>();
      ptx::fence_async_proxy();
    }
    publish_info();
    shared_.raw_empty[raw_ring_.at].arrive();
    raw_ring_.advance();
  }

  const Params& p_;
  typename C::SharedMemory& shared_;
  const int lane_;
  typename C::Rings rings_;
  ptx::Ring<C::kRawStages> raw_ring_;
  TilePosition tiles_;
  int kv_head_ = 0, seen_ = 0, kv_len_ = 0;  // of the tile of rows
};

}  // namespace flashq::cuda::tbq4_sm90
