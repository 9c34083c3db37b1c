// Shapes, shared memory, barriers and parameters of the sm_90 prefill kernel.
#pragma once
#include <cuda.h>

#include "core/half.h"
#include "cuda/ptx/mbarrier.cuh"

namespace flashq::cuda::sm90 {

// A tile of query rows of one sequence and pack of heads, and the key tiles that any of them sees. The producer finds
// it; everybody reads it.
struct Tile {
  int row;               // its first: row r is query r >> pack_log2, head r % pack of the pack
  int head;              // pack of query heads
  int batch;             // coordinate in all tensors
  int q_begin, k_begin;  // where the sequence starts in packed tensors
  int q_len, kv_len;     // kv_len -1: rows that belong to no sequence
  int first, end;        // key tiles
};
inline constexpr int kMostShared = 227 * 1024;  // bytes of a block
inline constexpr int kNoTile = -1;              // as row: there is no further tile

// kTileD: columns of a tile, of which head_dim are real. kTransform: scores are changed before the softmax (softcap, or
// a scale that is not positive).
template <class Element_, int kTileD_, bool kTransform_> struct Traits {
  using Element = Element_;
  static constexpr int kTileD = kTileD_;
  static constexpr bool kTransform = kTransform_;

  // Warpgroup 0 produces, the others consume 64 rows each. Three consumers pay only where O is small: 3 x 64 rows of
  // D 64 are 11-17 % faster than 2 x 64 with more keys a tile. (Transforms need the registers of two.)
  static constexpr int kConsumers = kTileD == 64 && !kTransform ? 3 : 2;
  static constexpr int kRows = 64, kTileQ = kRows * kConsumers;
  static constexpr int kThreads = 128 * (kConsumers + 1);
  static constexpr int kTileK = kTileD == 256 ? 80 : 128;
  static constexpr int kBoxes = kTileD / 64;
  static constexpr int kStages = 2;  // of K and of V; three do not gain
  // Q of the next tile arrives early where it fits (12 % on sequences of 512).
  static constexpr int kQStages = 2 * 2 * (kTileQ + kStages * kTileK) * kTileD <= kMostShared - 1024 ? 2 : 1;
  static constexpr int kTileSlots = 3;
  // Warpgroups take turns at the tensor cores, so that one computes its softmax meanwhile. At D 256 the products are so
  // long that it costs 2-5 %.
  static constexpr bool kPingPong = kTileD <= 128;
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
    ptx::Barrier tile_full[kTileSlots], tile_empty[kTileSlots];
    Tile tile[kTileSlots];

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
      for (int i = 0; i < kTileSlots; ++i) {
        tile_full[i].init(1);
        tile_empty[i].init(4 * kConsumers + 1);  // and the producer of Q
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
struct PlannedSequence { int32_t first_tile, batch, q_begin, q_len, k_begin, kv_len; };

// In the call's scratch.
struct Plan {
  int32_t drawn;  // tiles that the CTAs have drawn, beyond the first of each
  int32_t sequences, tiles;
  PlannedSequence sequence[1];  // in fact `sequences`
};

struct Schedule {
  int32_t* drawn;    // 0 at launch; null: tiles go round the CTAs
  const Plan* plan;  // of packed sequences; null: every sequence has q_len and kv_len
  int batch, q_len, kv_len, tiles;
  int pack_log2, head_packs, packs_per_kv;  // packs of query heads, in all and of one KV head
  bool descending;                          // row blocks differ in work: the longest first
  int l2_keys;                              // of one head, that CTAs at work at the same time should share
  int window_left, window_right;            // kWide: unlimited
};
inline constexpr int kWide = (1 << 30) - 2;  // added to a position, it still fits an int

// tanh(multiplier * x), which for |x| <= limit is about factor[0] x + factor[1] x^3 + factor[2] x^5.
struct Cap { float multiplier, limit, factor[3]; };

// Tensor dimensions of the maps: (column, head in pack, token, pack, batch). So the `pack` query heads of one token are
// neighbouring rows of a tile, without any copy. Boxes: (64, pack, 64 / pack, 1, 1), of K and V (64, 1, kTileK, 1, 1).
struct Params {
  CUtensorMap q, k, v, out;
  int q_batch_step, k_batch_step, v_batch_step;  // 1; 0 where the stride is: all sequences are one
  Schedule schedule;
  uint16_t* out_rows;      // for tiles that end with their sequence inside a packed tensor
  int64_t out_stride[2];   // token, head
  const uint16_t* v_rows;  // for rows that see one key
  int64_t v_stride[3];     // batch, token, head
  int head_dim;
  float* lse;
  int64_t lse_stride[3];
  const float* sinks;
  int64_t sinks_stride;
  bool packed_keys;  // rows past a sequence's end are its neighbour's
  bool capped;       // kTransform: scores are capped, else only multiplied by cap.multiplier
  Cap cap;
  float scale_log2;  // of raw or transformed scores, >= 0
};

}  // namespace flashq::cuda::sm90
