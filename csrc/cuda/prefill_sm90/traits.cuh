// Shapes, shared memory, barriers and parameters of the sm_90 prefill kernel.
#pragma once
#include <cuda.h>

#include "core/half.h"
#include "cuda/ptx/mbarrier.cuh"
#include "params.h"

namespace flashq::cuda::sm90 {

// A tile of query rows of one sequence and pack of heads, and the key tiles that any of them sees (of its split). The
// producer finds it; everybody reads it.
struct Tile {
  int row;               // its first: row r is query r >> pack_log2, head r % pack of the pack
  int head;              // pack of query heads
  int batch;             // of q and out
  int sequence;          // of K and V: their batch, or the row of the page table
  int q_begin, k_begin;  // where the sequence starts in packed tensors
  int q_len, kv_len;     // kv_len -1: rows that belong to no sequence
  int kv_start;
  int split;
  int seen;        // the first key that any row sees
  int first, end;  // key tiles
};
inline constexpr int kMostShared = 227 * 1024;  // bytes of a block
inline constexpr int kNoTile = -1;              // as row: there is no further tile

// kTileD: columns of a tile, of which head_dim are real. kGeneral: softcap, any scale, caches; else a positive scale
// and dense or packed keys.
template <class Element_, int kTileD_, bool kGeneral_> struct Traits {
  using Element = Element_;
  static constexpr int kTileD = kTileD_;
  static constexpr bool kGeneral = kGeneral_;

  // Warpgroup 0 produces, the others consume 64 rows each. Three consumers pay only where O is small: 3 x 64 rows of
  // D 64 are 11-17 % faster than 2 x 64 with more keys a tile. (The general kernel needs the registers of two.)
  static constexpr int kConsumers = kTileD == 64 && !kGeneral ? 3 : 2;
  static constexpr int kRows = 64, kTileQ = kRows * kConsumers;
  static constexpr int kThreads = 128 * (kConsumers + 1);
  static constexpr int kTileK = kTileD == 256 ? 80 : 128;
  static constexpr int kBoxes = kTileD / 64;
  static constexpr int kStages = 2;  // of K and of V; three do not gain
  // Q of the next tiles arrives early where it fits (of one: 12 % on sequences of 512; of a second: 2.5 %).
  static constexpr int kQStages = kTileD == 128 ? 3 : kTileD < 128 ? 2 : 1;
  static constexpr int kTileSlots = kTileD == 128 ? 4 : 2;
  // Warpgroups take turns at the tensor cores, so that one computes its softmax meanwhile. At D 256 the products are so
  // long that it costs 2-5 %.
  static constexpr bool kPingPong = kTileD <= 128;
  static constexpr bool kStartEarly = kQStages > 1;
  static_assert(kPingPong || !kStartEarly);
  // Whether P is first tried without maxima, and softcap as a polynomial. At D 256 there are no registers for it, and
  // products take so long that maxima, and the hardware's tanh, hide behind them.
  static constexpr bool kSkipsMaxima = kTileD <= 128;
  // Scores of a thread that become P while the last product is still under way (half of them at D 128: 4 to 6 %).
  static constexpr int kAhead = kTileD == 128 ? 32 : 0, kCappedAhead = kTileD == 128 ? 32 : 16;
  // Registers: 168 a thread at launch for 3 warpgroups, 128 for 4.
  static constexpr int kProducerRegisters = kConsumers == 3 ? 32 : 40;
  static constexpr int kConsumerRegisters = kConsumers == 3 ? 160 : 232;

  struct SharedMemory {
    using Box = uint16_t[64];
    alignas(1024) Box q[kQStages][kConsumers][kBoxes][kRows];  // O leaves through it
    alignas(1024) Box k[kStages][kBoxes][kTileK];
    alignas(1024) Box v[kStages][kBoxes][kTileK];
    ptx::Barrier q_full[kQStages][kConsumers], q_empty[kQStages][kConsumers];
    ptx::Barrier k_full[kStages], k_empty[kStages], v_full[kStages], v_empty[kStages];
    ptx::Barrier tile_full[kTileSlots], tile_empty[kTileSlots], may_draw;
    Tile tile[kTileSlots], later_tile;
    uint32_t missing[kStages];  // kGeneral: bit i: keys 16 i to 16 i + 15 of the K tile are on no page

    __device__ void init_barriers() {
      for (auto& stage : q_full)
        for (ptx::Barrier& barrier : stage) barrier.init(1);
      for (auto& stage : q_empty)
        for (ptx::Barrier& barrier : stage) barrier.init(1);
      for (int i = 0; i < kStages; ++i) {
        k_full[i].init(1);
        v_full[i].init(1);
        k_empty[i].init(4 * kConsumers);  // warps
        v_empty[i].init(4 * kConsumers);
      }
      may_draw.init(1);
      for (int i = 0; i < kTileSlots; ++i) {
        tile_full[i].init(1);
        tile_empty[i].init(128 * kConsumers + 65);  // all who read it: the producers are two warps and a thread
      }
    }
  };
  static_assert(kThreads / 128 * 128 * (kConsumers == 3 ? 128 : 168) >=
                128 * (kProducerRegisters + kConsumers * kConsumerRegisters));
  static_assert(sizeof(SharedMemory) <= kMostShared);

  // Named barriers (0 is __syncthreads).
  static FLASHQ_HD constexpr int turn_barrier(int consumer) { return 1 + consumer; }
  static FLASHQ_HD constexpr int warpgroup_barrier(int consumer) { return 1 + kConsumers + consumer; }
};

// One sequence of a planned schedule, the longest first.
struct PlannedSequence { int32_t first_tile, batch, sequence, q_begin, q_len, k_begin, kv_len, kv_start; };

// In the call's scratch.
struct Plan {
  int32_t drawn;  // items that the CTAs have drawn, beyond the first of each
  int32_t sequences, tiles;
  PlannedSequence sequence[1];  // in fact `sequences`
};

// An item of work is a tile of rows, or one of its `splits` along the keys.
struct Schedule {
  int32_t* drawn;    // 0 at launch; null: items go round the CTAs
  const Plan* plan;  // of packed sequences and caches; null: every sequence has q_len and kv_len
  int batch, q_len, kv_len, tiles, splits;
  int pack_log2, head_packs, packs_per_kv;  // packs of query heads, in all and of one KV head
  bool descending;                          // row blocks differ in work: the longest first
  int l2_keys;                              // of one head, that CTAs at work at the same time should share
  int window_left, window_right;            // kWide: unlimited
};
inline constexpr int kMostSplits = 64, kLeastSplit = 2048;  // keys of a split; merging costs as much as some 200
inline constexpr int kWide = (1 << 30) - 2;                 // added to a position, it still fits an int

// How keys lie in a cache with a page table: boxes of `box` keys, each on one page.
struct Pages {
  IndexView table;  // absent: sequence b is page b
  int count, size, box;
  int tile_pages, tile_slots;  // of a key tile: whole pages, and slots beyond them
};

enum class Transform : int { kNone, kMultiply, kCap };

// tanh(multiplier * x), which for x^2 <= largest_square is a polynomial, off by 1.7e-4 relative. -1: never.
struct Cap {
  float multiplier, largest_square;
  float exponent_factor[2];  // tanh(multiplier * x) * scale_log2 is [0] x + [1] x^3
};

// Tensor dimensions of the maps: (column, head in pack, token, pack, batch or page). So the `pack` query heads of one
// token are neighbouring rows of a tile, without any copy. Boxes: (64, pack, 64 / pack, 1, 1), of K and V (64, 1,
// kTileK or Pages::box, 1, 1).
struct Params {
  CUtensorMap q, k, v, out;
  int q_batch_step, k_batch_step, v_batch_step;  // 1; 0 where the stride is: all sequences are one
  Schedule schedule;
  Pages pages;
  uint16_t* out_rows;      // for tiles that end with their sequence inside a packed tensor
  int64_t out_stride[2];   // token, head
  const uint16_t* v_rows;  // for rows that see one key
  int64_t v_stride[3];     // batch or page, token, head
  int head_dim;
  float* lse;
  int64_t lse_stride[3];
  float *partial_out, *partial_lse;  // of splits: (split, batch, token, head, column) and without the column
  const float* sinks;
  int64_t sinks_stride;
  bool packed_queries;  // rows past a sequence's end are its neighbour's
  bool shared_keys;     // keys outside [kv_start, kv_len) are somebody else's, and may be NaN
  Transform transform;  // kGeneral: of raw scores, times cap.multiplier or also capped
  Cap cap;
  float scale_log2;  // of raw or transformed scores, positive
};

}  // namespace flashq::cuda::sm90
