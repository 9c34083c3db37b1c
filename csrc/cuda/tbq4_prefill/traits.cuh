// Shapes, shared memory, barriers and parameters of tbq4_attention for many rows on Hopper.
#pragma once
#include "core/tbq4/codebook.h"
#include "cuda/prefill_sm90/schedule.cuh"
#include "cuda/softmax_step.cuh"
#include "cuda/vector.cuh"

namespace flashq::cuda::tbq4_sm90 {

using sm90::Keys;
using sm90::Schedule;
using sm90::Tile;

// Of a query row (token, head) as prepare_queries.cuh leaves it.
struct RowFactors {
  float scores;   // what products of q's fp16 part and keys, times Params::norm_factor, are multiplied by besides
  float offsets;  // from products of the raw query to scores in base 2 (before the cap)
};
struct RowScale {
  RowFactors factors;
  float reach;  // length(q) * scale
};

inline constexpr float kMostWeight = 65504;    // times its norm, in fp16
inline constexpr float kLeastNorm = 0x1p-24f;  // shorter values count as that long
inline constexpr int kTileRows = 128;          // query rows of a CTA at a time

// Flags of a tile of keys.
inline constexpr uint32_t kLast = 1;         // of the tile of rows
inline constexpr uint32_t kExact = 2;        // of the exact pool
inline constexpr uint32_t kCoarse = 4;       // the query's fp16 part is not enough: add the rest of it
inline constexpr uint32_t kRest = 8;         // the K buffer holds what fp16 left of the keys, the next one the keys
inline constexpr uint32_t kPoison = 32;      // some value is NaN
inline constexpr uint32_t kIncomplete = 16;  // some of the keys are on no page
inline constexpr uint32_t kFinish = 64;      // of some row, scores are more than products, norms and page offsets

inline constexpr uint32_t kUneven = 128;  // the norms of values are too different to be part of fp16 values

// What is known of the tile in a K buffer. A thread's columns 8 j + 2 t + e are neighbours here, at 2 j + e of row t,
// rows are padded against bank conflicts.
template <int kTileK> struct alignas(16) KeyTile {
  static constexpr int kRow = (kTileK / 16 | 1) * 4;
  float k_norm[4][kRow], v_norm[4][kRow];
  // By t, bit 2 j + e; written where keys are missing or the exact pool may have some.
  uint32_t there[4];  // the key is on a page, and read as codes by some row
  uint32_t held[4];   // the exact pool has the key
  // As those, by block; written of tiles with kPoison. The buffer of V holds zeros there: 0 times NaN is NaN.
  uint32_t poison[2][4];
  struct alignas(16) Facts {
    uint32_t flags;
    int first;   // its first key
    float most;  // of weights before norms, so that fp16 holds their products with the largest v_norm
    float unit;  // log2 of what all weights are multiplied by; without kUneven it stands for their norms
  } facts;
};

// A position in a ring of kSize buffers, a power of two.
template <int kSize> struct RingPosition {
  uint32_t count;

  __device__ __forceinline__ int at() const { return static_cast<int>(count % kSize); }
  __device__ __forceinline__ uint32_t parity() const { return count / kSize % 2; }
};

// Positions in the rings of K buffers and of what is known of them, in one register; they wrap at 2^16. Every tile of
// keys has one V, but K may take two buffers.
template <int kStages, int kVStages, int kInfoStages, int kOffsetStages> class RingPositions {
 public:
  __device__ __forceinline__ RingPosition<kStages> k() const { return {counts_}; }
  __device__ __forceinline__ RingPosition<kInfoStages> info() const { return {counts_ >> 16}; }
  __device__ __forceinline__ RingPosition<kOffsetStages> offsets() const { return {counts_ >> 16}; }
  // Of the tile so many before the next one of info().
  __device__ __forceinline__ RingPosition<kVStages> v(uint32_t before) const { return {(counts_ >> 16) - before}; }
  __device__ __forceinline__ void advance_k() { counts_ = (counts_ & 0xffff0000) | (counts_ + 1 & 0xffff); }
  __device__ __forceinline__ void advance_info() { counts_ += 0x10000; }

 private:
  uint32_t counts_ = 0;  // K, then the others
};

// A position in the ring of two tiles of rows, and the parity of their Q, which tiles without keys do not have.
class TilePosition {
 public:
  __device__ __forceinline__ int at() const { return static_cast<int>(state_ & 1); }
  __device__ __forceinline__ uint32_t parity() const { return state_ >> 1 & 1; }
  __device__ __forceinline__ uint32_t q_parity() const { return state_ >> 2; }
  __device__ __forceinline__ void advance() { state_ = (state_ & 4) | (state_ + 1 & 3); }
  __device__ __forceinline__ void advance_q() { state_ ^= 4; }

 private:
  uint32_t state_ = 0;
};

// The eight negative levels in fp16, from the lowest on, low and high bytes apart: what PRMT looks up.
struct alignas(16) LevelBytes { uint32_t low[2], high[2]; };

template <int kDim_, bool kOffsets_> struct Traits {
  static constexpr int kDim = kDim_;
  static constexpr bool kOffsets = kOffsets_;  // the raw queries are in shared memory too
  static constexpr int kWidth = tbq4::block_width(kDim), kBlocks = kDim / kWidth;

  // Warps 0 to 7 produce: one loads codes, one describes keys, the others expand. Two warpgroups consume 64 rows each.
  static constexpr int kProducers = 8, kLoader = 0, kDescriber = 1, kExpanders = kProducers - 2;
  static constexpr int kConsumers = 2, kRows = 64, kTileQ = kRows * kConsumers;
  static constexpr int kThreads = 32 * kProducers + 128 * kConsumers;
  static_assert(kTileQ == kTileRows);
  // Keys: what fits shared memory, and the registers of consumers.
  static constexpr int kTileK = kDim == 64 ? 128 : kDim == 128 ? (kOffsets ? 96 : 112) : (kOffsets ? 32 : 48);
  static constexpr int kGroups = kTileK / 16;  // of 16 keys, which lie on one page
  static constexpr int kBoxes = kDim / 64;
  static constexpr int kStages = 2, kVStages = 2, kInfoStages = 4;
  static constexpr int kRawStages = kDim == 256 && kOffsets ? 2 : 4, kOffsetStages = kDim == 256 ? 2 : 4;
  static constexpr int kTileSlots = 2;
  static constexpr int kProducerRegisters = kDim == 256 ? 56 : 64, kConsumerRegisters = 256 - kProducerRegisters;

  // Keys of a lane of the warp that describes them.
  static constexpr int kLaneKeys = kTileK > 64 ? 4 : 2;
  // An expanding warp takes 512 bytes of codes at a time, 16 bytes a lane.
  static constexpr int kUnitKeys = 512 / (kDim / 2), kUnits = kTileK / kUnitKeys;

  // length(q) * norm(k) * scale from which on queries, and from which on keys, have a second fp16 part. 2 sqrt(kDim):
  // where query and key are parallel, rounding the query moves their score by 7e-4 (standard deviation). Of head dim
  // 256 keys are products with norms, rounded like queries.
  static constexpr float kReachOfQuery = kDim == 64 ? 16 : kDim == 128 ? 22.6f : 32;
  static constexpr float kReachOfKeys = kBlocks == 2 ? 40 : 300;

  using Rings = RingPositions<kStages, kVStages, kInfoStages, kOffsetStages>;

  // Keys or values of a tile as they lie in the cache. Of head dim 256 the norms become factors of the values.
  struct RawTile {
    alignas(128) uint8_t codes[kTileK][kDim / 2];
    alignas(16) uint16_t norms[kTileK][kBlocks];
  };
  struct RawTiles {
    RawTile k, v;
    int page[kGroups];  // -1: the group is not there
    bool missing;       // some row sees a key that is on no page
  };

  struct SharedMemory {
    using Box = uint16_t[64];
    alignas(1024) Box q[kConsumers][kBoxes][kRows];
    alignas(1024) Box k[kStages][kBoxes][kTileK];
    alignas(1024) Box v[kVStages][kBoxes][kTileK];
    alignas(1024) Box raw_q[kOffsets ? kConsumers : 0][kBoxes][kRows];
    alignas(1024) Box offsets[kOffsets ? kOffsetStages : 0][kBoxes][8];  // of the pages of groups of 16 keys
    RawTiles raw[kRawStages];
    KeyTile<kTileK> info[kInfoStages];
    ptx::Barrier q_full[kConsumers], q_empty[kConsumers];
    ptx::Barrier raw_full[kRawStages], raw_empty[kRawStages], info_full[kInfoStages], info_empty[kInfoStages];
    ptx::Barrier k_full[kStages], k_empty[kStages], v_full[kVStages], v_empty[kVStages];
    ptx::Barrier tile_full[kTileSlots], tile_empty[kTileSlots];
    Tile tile[kTileSlots];
    alignas(16) float ones[kTileK / 4];
    // One for each lane, to have them in its registers: PRMT takes one uniform register, others would be copied first.
    LevelBytes levels[32];
    uint8_t poison[128 * kConsumers];  // by thread of consumers
    RowFactors row_factors[kTileQ];
    bool missing[4 * kConsumers];  // by warp of consumers: some row sees a key that is on no page

    // What threads read or write themselves, each of them arrives for: an arrival is cheap, and tells tools which look
    // for races what no barrier of a warp tells them.
    __device__ void init_barriers() {
      for (int i = 0; i < kConsumers; ++i) {
        q_full[i].init(1);
        q_empty[i].init(4);
      }
      for (int i = 0; i < kRawStages; ++i) {
        raw_full[i].init(32);
        raw_empty[i].init(32 * (kExpanders + 1));
      }
      for (int i = 0; i < kInfoStages; ++i) {
        info_full[i].init(32);
        info_empty[i].init(128 * kConsumers);
      }
      for (int i = 0; i < kStages; ++i) {
        k_full[i].init(32 * kExpanders);
        k_empty[i].init(4 * kConsumers);
      }
      for (int i = 0; i < kVStages; ++i) {
        v_full[i].init(32 * kExpanders);
        v_empty[i].init(4 * kConsumers);
      }
      for (int i = 0; i < kTileSlots; ++i) {
        tile_full[i].init(1);
        tile_empty[i].init(kThreads);
      }
    }
  };
  static_assert(65536 >= 32 * kProducers * kProducerRegisters + 128 * kConsumers * kConsumerRegisters);
  static_assert(sizeof(SharedMemory) <= sm90::kMostShared);

  // Named barriers (0 is __syncthreads).
  static FLASHQ_HD constexpr int turn_barrier(int consumer) { return 1 + consumer; }
};

struct Params {
  CUtensorMap q, raw_q;  // in the call's scratch: (token, head, column), fp16,
                         // rotated and raw
  Schedule schedule;
  AttentionTbq4Params call;
  ScoreRule rule;
  Divisor page_size, exact_page_size;
  LevelBytes levels;
  float norm_factor;                 // part of the keys' norms: from products to scores in base 2
  const RowScale* rows;              // (token, head)
  const uint16_t* q_rest;            // (token, head, column): what fp16 left of the rotated query
  float *partial_out, *partial_lse;  // of splits: (split, token, head, column)
                                     // and without the column
  bool wide_offsets, wide_exact;     // 16-byte loads reach them
  bool exact;                        // some keys may be read from the exact pool
  bool general;                      // a score is more than a product times a moderate positive factor
};

// A query's number in the order of the scratch.
__device__ __forceinline__ int64_t row_of(const Params& p, const Tile& tile, int query, int head) {
  return (int64_t{tile.batch} * p.schedule.q_len + tile.q_begin + query) * p.call.query.q_heads + head;
}

// Where the exact pool has a key; page -1 where it has not.
struct PoolPlace {
  int64_t page;
  int slot;
};
__device__ __forceinline__ PoolPlace find_in_pool(const Params& p, const Tile& tile, int key) {
  const KvView& pool = p.call.kv.exact;
  const int at = p.exact_page_size.quotient(key);
  if (at >= pool.max_pages) return {-1, 0};
  const int64_t page = pool.block_table(tile.sequence, at);
  return {page < pool.num_pages ? page : -1, key - at * static_cast<int>(p.exact_page_size.value)};
}

// Tiles of keys of which some row reads some from the exact pool: [first, lead) and [recent, end) of a tile of rows.
struct ExactTiles {
  int first, lead, recent, end;

  __device__ __forceinline__ bool any() const { return lead > first || recent < end; }
  // function(n, whether it is the last one)
  __device__ __forceinline__ void for_each(const auto& function) const {
    if (!any()) return;
    for (int n = end - 1; n >= first; --n) {
      if (n >= lead && n < recent) continue;
      function(n, n == first || (n == recent && lead == first));
    }
  }
};

// Keys that a query reads exactly: below lead_end, and from recent_begin() on.
struct ExactKeys {
  int lead_end, last, position;

  __device__ __forceinline__ ExactKeys(const Params& p, const Tile& tile) {
    const auto within = [](int64_t x) { return static_cast<int>(min_of<int64_t>(x, sm90::kWide)); };
    lead_end = p.exact ? min(tile.kv_len, tile.kv_start + within(p.call.kv.exact_first)) : 0;
    last = p.exact ? within(p.call.kv.exact_last) : 0;
    position = tile.kv_len - tile.q_len;
  }
  __device__ __forceinline__ int recent_begin(int query) const {
    return last > 0 ? position + query - last + 1 : sm90::kWide;
  }
  template <class C> __device__ __forceinline__ ExactTiles tiles(const Params& p, const Tile& tile) const {
    ExactTiles tiles{tile.first, tile.first, tile.end, tile.end};
    if (!p.exact) return tiles;
    int lead = lead_end > tile.seen ? lead_end + C::kTileK - 1 : 0;
    asm("" : "+r"(lead));  // else ptxas predicates the division and keeps what its result was before, in registers
    tiles.lead = max(min(tile.end, lead / C::kTileK), tile.first);
    const int recent = max(recent_begin(tile.row >> p.schedule.pack_log2), 0) / C::kTileK;
    tiles.recent = max(min(recent, tile.end), tiles.lead);
    return tiles;
  }
};

}  // namespace flashq::cuda::tbq4_sm90
