// The producer warpgroup: finds tiles, loads Q, and expands codes. Every warp looks up all pages and norms of a tile of
// keys, so that the four agree without a barrier, and expands a quarter of it.
#pragma once
#include "cuda/ptx/dependent_launch.cuh"
#include "cuda/ptx/tma.cuh"
#include "cuda/tbq4_attention/scores.cuh"
#include "cuda/tbq4_prefill/exact_keys.cuh"
#include "cuda/tbq4_prefill/expand.cuh"
#include "cuda/tbq4_prefill/norms.cuh"

namespace flashq::cuda::tbq4_sm90 {

// Volatile, so that it stays ahead of the waits that it is meant to overlap.
__device__ __forceinline__ uint4 load_ahead(const void* from, bool there) {
  uint4 x{};
  if (there)
    asm volatile("ld.global.nc.L1::no_allocate.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
                 : "l"(from));
  return x;
}

template <class C> class CodeProducer {
  static constexpr int kLaneKeys = C::kLaneKeys, kNormWords = kLaneKeys * C::kBlocks / 2;
  using Norms = LaneNorms<C>;
  static constexpr int kChunks = C::kDim / 8;  // of 16 bytes, of a row
  static_assert(!C::kOffsets || C::kGroups * kChunks <= 128);

 public:
  __device__ __forceinline__ CodeProducer(const Params& p, typename C::SharedMemory& shared)
      : p_(p), shared_(shared), thread_(static_cast<int>(threadIdx.x)) {}

  __device__ __forceinline__ void run() {
    const int lane = thread() % 32, warp = thread() / 32;
    if (thread() == 0) {
      sm90::find_tile<C>(p_.schedule, static_cast<int>(blockIdx.x), shared_.tile[0]);
      shared_.tile_full[0].arrive();
    }
    __syncwarp();
    while (true) {
      shared_.tile_full[tiles_.at()].wait(tiles_.parity());
      const Tile& tile = shared_.tile[tiles_.at()];
      if (tile.row == sm90::kNoTile) return;
      if (tile.first < tile.end) {
        produce_tile(tile);
        tiles_.advance_q();
      }
      __syncwarp();
      if (lane == 0) shared_.tile_empty[tiles_.at()].arrive();
      tiles_.advance();
      if (warp == 0) {
        if (lane == 0) {
          shared_.tile_empty[tiles_.at()].wait(tiles_.parity() ^ 1);
          const int item = static_cast<int>(gridDim.x) + atomicAdd(p_.schedule.drawn, 1);
          sm90::find_tile<C>(p_.schedule, item, shared_.tile[tiles_.at()]);
          shared_.tile_full[tiles_.at()].arrive();
        }
        __syncwarp();
      }
    }
  }

 private:
  // threadIdx.x, opaque: what follows from it is worked out where it is used, because it does not fit the registers.
  __device__ __forceinline__ int thread() const {
    int x = thread_;
    asm volatile("" : "+r"(x));
    return x;
  }

  __device__ __forceinline__ const char* pairs() const { return reinterpret_cast<const char*>(&shared_.pairs); }
  __device__ __forceinline__ uint32_t lane4() const { return static_cast<uint32_t>(thread() % 32 * 4); }

  // Q of both warpgroups, by one thread.
  __device__ __forceinline__ void load_queries(const Tile& tile) {
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

  // The largest reach of the rows.
  __device__ __forceinline__ float find_reach(const Tile& tile) const {
    uint32_t top = 0;
#pragma unroll 1
    for (int i = thread() % 32; i < C::kTileQ; i += 32) {
      const int row = tile.row + i, query = row >> p_.schedule.pack_log2;
      if (query >= tile.q_len) break;
      const int head = (tile.head << p_.schedule.pack_log2) + row - (query << p_.schedule.pack_log2);
      // Of nonnegative numbers the bits have the same order; NaN is above all.
      top = max(top, bits_of(p_.rows[row_of(p_, tile, query, head)].reach) & 0x7fffffff);
    }
    return float_of(__reduce_max_sync(~0u, top));
  }

  // Starts to look up the page of this lane's keys of tile n.
  __device__ __forceinline__ void look_up(const Tile& tile, int n) {
    const int lane = thread() % 32;
    const int group = (n * C::kTileK + lane * kLaneKeys) & -16;
    wanted_ = n >= tile.first && lane < C::kTileK / kLaneKeys && group + 16 > tile.seen && group < tile.kv_len;
    low_ = tile.sequence;
    high_ = 0;
    const IndexView& table = p_.call.kv.block_table;
    if (!table.given() || !wanted_) return;
    const int64_t at = tile.sequence * table.stride[0] + p_.page_size.quotient(group) * table.stride[1];
    const auto* entry = static_cast<const uint32_t*>(table.data) + (table.is_int64 ? 2 * at : at);
    asm volatile("ld.global.nc.b32 %0, [%1];" : "=r"(low_) : "l"(entry));
    if (table.is_int64) asm volatile("ld.global.nc.b32 %0, [%1];" : "=r"(high_) : "l"(entry + 1));
  }
  // The row of the planes where the 16 keys around this lane's are, or -1; of what was looked up last.
  __device__ __forceinline__ void find_row(const Tile& tile, int n) {
    const Tbq4View& kv = p_.call.kv;
    const bool found = high_ == 0 && low_ < static_cast<uint32_t>(kv.num_pages);
    missing_ = wanted_ && !found;
    page_ = wanted_ && found ? static_cast<int>(low_) : -1;
    const int group = (n * C::kTileK + thread() % 32 * kLaneKeys) & -16;
    const int size = static_cast<int>(p_.page_size.value);
    const int slot = kv.block_table.given() ? group - p_.page_size.quotient(group) * size : group;
    row_ = page_ < 0 ? -1 : (int64_t{page_} * p_.call.query.kv_heads + kv_head_) * kv.page_size + slot;
  }
  __device__ __forceinline__ void load_norms(const uint16_t* plane, Norms& norms) const {
    const int64_t row = row_ + thread() % 32 * kLaneKeys % 16;
    const auto* from = reinterpret_cast<const uint32_t*>(plane + row * C::kBlocks);
#pragma unroll
    for (int i = 0; i < kNormWords; ++i) {
      norms[i] = 0;
      if (row_ >= 0) asm volatile("ld.global.nc.b32 %0, [%1];" : "=r"(norms[i]) : "l"(from + i));
    }
  }
  __device__ __forceinline__ void load_codes(const uint8_t* plane, uint4 (&codes)[C::kUnits]) const {
#pragma unroll
    for (int u = 0; u < C::kUnits; ++u) codes[u] = load_unit(plane, u);
  }
  __device__ __forceinline__ uint4 load_unit(const uint8_t* plane, int u) const {
    const UnitPlace place = place_unit<C>(thread(), u);
    const int64_t row = __shfl_sync(~0u, row_, (place.key & -16) / kLaneKeys % 32);
    const bool there = row >= 0 && place.key < C::kTileK;
    return load_ahead(plane + (row + place.key % 16) * (C::kDim / 2) + place.quarter * 16, there);
  }

  // Which of this lane's keys are read as codes by some row, and which the pool has; by bit.
  struct LaneKeys { uint32_t there, held; };
  __device__ __forceinline__ LaneKeys find_keys(const Tile& tile, const ExactKeys& exact, int n) const {
    LaneKeys found{0, 0};
    const int first = n * C::kTileK + thread() % 32 * kLaneKeys;
    const int last_query = min((tile.row + C::kTileQ - 1) >> p_.schedule.pack_log2, tile.q_len - 1);
    const bool near = p_.exact && ((n * C::kTileK < exact.lead_end) ||
                                   (n + 1) * C::kTileK > exact.recent_begin(tile.row >> p_.schedule.pack_log2));
    if (thread() % 32 >= C::kTileK / kLaneKeys) return found;
#pragma unroll
    for (int i = 0; i < kLaneKeys; ++i) {
      const int key = first + i;
      bool there = row_ >= 0 && key >= tile.seen && key < tile.kv_len;
      if (near && key >= tile.seen && key < tile.kv_len && p_.call.kv.exact.holds(tile.sequence, key)) {
        found.held |= 1u << i;
        if (key < exact.lead_end || key >= exact.recent_begin(last_query)) there = false;  // nobody reads its codes
      }
      if (there) found.there |= 1u << i;
    }
    return found;
  }

  // The factor of the values of unit u, fp16 twice.
  __device__ __forceinline__ uint32_t factor_of_unit(const Norms& norms, int unit) const {
    uint32_t both = 0;
    if constexpr (C::kBlocks == 2) {
      const UnitPlace place = place_unit<C>(thread(), unit);
#pragma unroll
      for (int i = 0; i < kLaneKeys; ++i) {
        const uint32_t other = __shfl_sync(~0u, norms[i], place.key / kLaneKeys % 32);
        if (place.key % kLaneKeys == i) both = other;
      }
    }
    return __byte_perm(both, 0, unit % 2 ? 0x3232 : 0x1010);
  }

  // Bits of the lanes' keys in the order of a thread's columns.
  __device__ __forceinline__ uint32_t gather(uint32_t keys, int t) const {
    const int lane = thread() % 32;
    uint32_t mine = 0;
#pragma unroll
    for (int i = 0; i < kLaneKeys; ++i) {
      const int key = lane * kLaneKeys + i;
      if (key % 8 / 2 == t) mine |= (keys >> i & 1) << (key / 8 * 2 + key % 2);
    }
    return __reduce_or_sync(~0u, mine);
  }

  // A unit is read from the table before the one ahead of it is stored: the compiler, to which both are shared memory,
  // would not move one past the other.
  __device__ __forceinline__ void expand(const void* buffer, const uint4 (&codes)[C::kUnits], const Norms& norms) {
    const uint32_t tile = ptx::shared_address(buffer);
    const int own = thread();
    const uint32_t copy = lane4();
    uint32_t values[2][16];
    read_unit<C, false>(pairs(), copy, codes[0], factor_of_unit(norms, 0), values[0]);
#pragma unroll
    for (int u = 0; u < C::kUnits; ++u) {
      if (u + 1 < C::kUnits)
        read_unit<C, false>(pairs(), copy, codes[u + 1], factor_of_unit(norms, u + 1), values[(u + 1) % 2]);
      if (C::kTileK % 64 == 0 || C::kTileK < 64 || place_unit<C>(own, u).key < C::kTileK)
        store_unit<C>(tile, own, u, values[u % 2]);
    }
  }
  // What fp16 left of the keys that expand() will have; their codes are read again.
  __device__ __forceinline__ void expand_rest(const Norms& norms) {
#pragma unroll 1
    for (int u = 0; u < C::kUnits; ++u) {
      uint32_t values[16];
      read_unit<C, true>(pairs(), lane4(), load_unit(p_.call.kv.k_codes, u), factor_of_unit(norms, u), values);
      if (place_unit<C>(thread(), u).key < C::kTileK)
        store_unit<C>(ptx::shared_address(shared_.k[rings_.k().at()]), thread(), u, values);
    }
  }
  // Ends what this warp writes to a buffer.
  __device__ __forceinline__ void publish(ptx::Barrier& full) const {
    ptx::fence_async_proxy();
    __syncwarp();
    if (thread() % 32 == 0) full.arrive();
  }
  template <class Ring>
  __device__ __forceinline__ void acquire(ptx::Barrier* empty, const Ring& ring) const {
    empty[ring.at()].wait(ring.parity() ^ 1);
  }

  // This warp's part of what is known of a tile, into the buffer of rings_.info().
  __device__ __forceinline__ void write_info(int first, uint32_t flags, const LaneKeys& keys,
                                             const float (&k_norm)[kLaneKeys], const float (&v_norm)[kLaneKeys]) {
    auto& info = shared_.info[rings_.info().at()];
    const int lane = thread() % 32, warp = thread() / 32;
    float top = 0x1p-24f;
#pragma unroll
    for (int i = 0; i < kLaneKeys; ++i) top = fmaxf(top, fabsf(v_norm[i]));
    if (const int first = lane * kLaneKeys; first / C::kWarpKeys == warp && first < C::kTileK) {
#pragma unroll
      for (int i = 0; i < kLaneKeys; i += 2) {
        const int key = first + i;
        float* const k = &info.k_norm[key % 8 / 2][key / 8 * 2 + key % 2];
        float* const v = &info.v_norm[key % 8 / 2][key / 8 * 2 + key % 2];
        if constexpr (kLaneKeys > 1) {
          store(k, float2{k_norm[i], k_norm[i + 1]});
          store(v, float2{v_norm[i], v_norm[i + 1]});
        } else {
          *k = k_norm[i];
          *v = v_norm[i];
        }
      }
    }
    top = __log2f(float_of(__reduce_max_sync(~0u, bits_of(top))));
    if (lane == 0) info.v_top[warp] = top;
    write_keys(info, first, flags, keys);
  }
  __device__ __forceinline__ void write_keys(KeyTile<C::kTileK>& info, int first, uint32_t flags,
                                             const LaneKeys& keys) const {
    if (thread() >= 32) return;
#pragma unroll
    for (int t = 0; t < 4; ++t) {
      const uint32_t there = flags & kIncomplete ? gather(keys.there, t) : ~0u,
                     held = p_.exact ? gather(keys.held, t) : 0;
      if (thread() == 0) {
        info.there[t] = there;
        info.held[t] = held;
      }
    }
    if (thread() == 0) {
      info.first = first;
      info.flags = flags;
    }
  }

  // This thread's piece of the page offsets of a tile, of the pages that were found last.
  __device__ __forceinline__ uint4 load_offsets() const {
    const Tbq4View& kv = p_.call.kv;
    const int group = thread() / kChunks, chunk = thread() % kChunks;
    const int page = __shfl_sync(~0u, page_, group * 16 / kLaneKeys % 32);
    const uint16_t* from = kv.k_offsets + page * kv.k_offsets_stride[0] + kv_head_ * kv.k_offsets_stride[1] + chunk * 8;
    const bool there = page >= 0 && group < C::kGroups;
    if (p_.wide_offsets) return load_ahead(from, there);
    return __builtin_bit_cast(uint4, load_eight(from, there, false));
  }
  __device__ __forceinline__ void store_offsets(const uint4& values) {
    const int group = thread() / kChunks, chunk = thread() % kChunks;
    if (group < C::kGroups)
      store(reinterpret_cast<char*>(shared_.offsets[rings_.k().at()][chunk / 8][group]) + (chunk % 8 ^ group) * 16,
            values);
  }

  __device__ __forceinline__ void produce_tile(const Tile& tile) {
    const Tbq4View& kv = p_.call.kv;
    const ExactKeys exact(p_, tile);
    const float reach = find_reach(tile);
    kv_head_ = tile.head / p_.schedule.packs_per_kv;
    const int first_query = tile.row >> p_.schedule.pack_log2;
    // Tiles with keys that some row reads exactly: [first, lead) and [recent, end).
    int lead = tile.first, recent = tile.end;
    if (p_.exact) {
      if (exact.lead_end > tile.seen) lead = min(tile.end, (exact.lead_end + C::kTileK - 1) / C::kTileK);
      recent = min(max(exact.recent_begin(first_query), 0) / C::kTileK, tile.end);
      lead = max(lead, tile.first);
      recent = max(recent, lead);
    }
    const bool any_exact = lead > tile.first || recent < tile.end;

    uint4 k_codes[C::kUnits], v_codes[C::kUnits];
    Norms k_norms, v_norms;
    int n = tile.end - 1;
    look_up(tile, n);
    find_row(tile, n);
    load_codes(kv.k_codes, k_codes);
    load_norms(kv.k_norms, k_norms);
    load_norms(kv.v_norms, v_norms);
    uint4 offsets{};
    if constexpr (C::kOffsets) offsets = load_offsets();
    look_up(tile, n - 1);
    bool queries_loaded = false;
    for (; n >= tile.first; --n) {
      load_codes(kv.v_codes, v_codes);
      const LaneKeys keys = find_keys(tile, exact, n);
      float k_factor[kLaneKeys], v_factor[kLaneKeys];
      const float longest = finish_norms<C>(k_norms, keys.there, k_factor);
      finish_norms<C>(v_norms, keys.there, v_factor);
      const float largest = float_of(__reduce_max_sync(~0u, bits_of(longest))) * reach;
      uint32_t flags = n == tile.first && !any_exact ? kLast : 0;
      if (!(largest <= C::kReachOfQuery)) flags |= kCoarse;
      if (!(largest <= C::kReachOfKeys)) flags |= kRest;
      if (__any_sync(~0u, missing_)) flags |= kIncomplete;
      bool poison = false;
#pragma unroll
      for (int i = 0; i < kLaneKeys; ++i) poison |= isnan(v_factor[i]);
      if (__any_sync(~0u, poison)) flags |= kPoison;
      acquire(shared_.info_empty, rings_.info());
      write_info(n * C::kTileK, flags, keys, k_factor, v_factor);
      rings_.advance_info();

      acquire(shared_.k_empty, rings_.k());
      if constexpr (C::kOffsets) store_offsets(offsets);
      if (flags & kRest) {
        expand_rest(k_norms);
        publish(shared_.k_full[rings_.k().at()]);
        rings_.advance_k();
        acquire(shared_.k_empty, rings_.k());
      }
      expand(shared_.k[rings_.k().at()], k_codes, k_norms);
      publish(shared_.k_full[rings_.k().at()]);
      rings_.advance_k();
      if (!queries_loaded) {
        queries_loaded = true;
        if (thread() == 0) load_queries(tile);
        __syncwarp();
      }
      Norms now;
#pragma unroll
      for (int i = 0; i < kNormWords; ++i) now[i] = v_norms[i];
      find_row(tile, n - 1);
      load_codes(kv.k_codes, k_codes);
      load_norms(kv.k_norms, k_norms);
      load_norms(kv.v_norms, v_norms);
      if constexpr (C::kOffsets) offsets = load_offsets();
      look_up(tile, n - 2);

      const auto values = rings_.v(1);
      acquire(shared_.v_empty, values);
      expand(shared_.v[values.at()], v_codes, now);
      publish(shared_.v_full[values.at()]);
    }
    if (!any_exact) return;
    for (n = tile.end - 1; n >= tile.first; --n) {
      if (n >= lead && n < recent) continue;
      const bool last = n == tile.first || (n == recent && lead == tile.first);
      produce_exact(tile, exact, n, last);
    }
  }

  // A tile of keys of the exact pool: what fp16 holds of the rotated rows, and of keys, in a buffer ahead, the rest.
  __device__ __forceinline__ void produce_exact(const Tile& tile, const ExactKeys& exact, int n, bool last) {
    const int lane = thread() % 32;
    row_ = -1;
    const LaneKeys keys = find_keys(tile, exact, n);
    const ExactRows<C> rows(p_, tile, exact, n);
    acquire(shared_.info_empty, rings_.info());
    acquire(shared_.k_empty, rings_.k());
    auto& info = shared_.info[rings_.info().at()];
    float top = 0x1p-24f;
    rows.for_each([&](int key, bool there) {
      const auto row = rows.load_row(p_.call.kv.exact.k, p_.call.kv.exact.k_stride, key, there);
      rows.store_row(shared_.k[rings_.k().at()], key, row.parts.rest);
      const float v_unit = rows.load_row(p_.call.kv.exact.v, p_.call.kv.exact.v_stride, key, there).unit;
      top = fmaxf(top, v_unit);
      if (lane % ExactRows<C>::kLanes == 0) {
        info.k_norm[key % 8 / 2][key / 8 * 2 + key % 2] = row.unit;
        info.v_norm[key % 8 / 2][key / 8 * 2 + key % 2] = v_unit;
      }
    });
    top = __log2f(float_of(__reduce_max_sync(~0u, bits_of(top))));
    if (lane == 0) info.v_top[thread() / 32] = top;
    write_keys(info, n * C::kTileK, kExact | kCoarse | kRest | (last ? kLast : 0), keys);
    rings_.advance_info();
    publish(shared_.k_full[rings_.k().at()]);
    rings_.advance_k();
    acquire(shared_.k_empty, rings_.k());
    rows.for_each([&](int key, bool there) {
      rows.store_row(shared_.k[rings_.k().at()], key,
                     rows.load_row(p_.call.kv.exact.k, p_.call.kv.exact.k_stride, key, there).parts.high);
    });
    publish(shared_.k_full[rings_.k().at()]);
    rings_.advance_k();
    const auto values = rings_.v(1);
    acquire(shared_.v_empty, values);
    rows.for_each([&](int key, bool there) {
      rows.store_row(shared_.v[values.at()], key,
                     rows.load_row(p_.call.kv.exact.v, p_.call.kv.exact.v_stride, key, there).parts.high);
    });
    publish(shared_.v_full[values.at()]);
  }

  const Params& p_;
  typename C::SharedMemory& shared_;
  int thread_;
  typename C::Rings rings_;
  TilePosition tiles_;
  uint32_t low_ = 0, high_ = 0;  // the table's entry
  int page_ = -1, kv_head_ = 0;
  int64_t row_ = -1;
  bool wanted_ = false, missing_ = false;
};

}  // namespace flashq::cuda::tbq4_sm90
