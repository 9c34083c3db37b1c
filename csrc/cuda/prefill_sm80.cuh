// Attention for many rows on tensor cores of compute capability 8.0 and newer: FlashAttention-2's structure.
//
// A block takes a tile of rows of one sequence and KV head and walks over the tiles of keys that some of its rows see.
// K and V tiles pass through a ring in shared memory (cp.async), from there to the tensor cores by ldmatrix; scores
// and weights never leave the registers. Two blocks on an SM hide each other's softmax and waits.
#pragma once
#include <cuda_runtime_api.h>

#include <type_traits>

#include "cuda/finish_rows.cuh"
#include "cuda/kv_rows.cuh"
#include "cuda/opt_in.h"
#include "cuda/prefill_sm80.h"
#include "cuda/ptx/mma.cuh"
#include "cuda/sequences.cuh"
#include "cuda/softmax_step.cuh"
#include "cuda/tile_copy.cuh"

namespace flashq::cuda {

namespace {

template <int kHeadDim> struct Shape {
  static constexpr int kDim = kHeadDim;
  static constexpr int kWarps = 4, kThreads = 32 * kWarps;
  static constexpr int kBlocks = 2;  // on an SM: 255 registers a thread
  // 32 rows a warp: a K or V fragment from shared memory then serves two products. Of 256 columns only 16 rows fit the
  // registers, but their queries fit as well.
  static constexpr int kM = kDim == 256 ? 1 : 2;
  static constexpr bool kQueryInRegisters = kDim == 256;
  static constexpr int kWarpRows = 16 * kM, kTileQ = kWarps * kWarpRows;
  static constexpr int kTileK = kDim == 64 ? 128 : 64;
  // Whether exponentials stand between the products with V, to fill their gaps. D 64: 2 % faster; D 128 and 256 lose 3
  // and 4 %, because they run out of registers.
  static constexpr bool kInterleave = kDim == 64;
  // Fragments of K and V are loaded in parts of so many, so many parts ahead of their products. D 128: 8 % faster; D 64
  // and 256 would lose 1 to 2 %.
  static constexpr int kPart = kDim == 128 ? 4 : 1, kLead = kDim == 128 ? 1 : 0;
  static constexpr int kMaxRing = 4;
  static constexpr int kTileBytes = kTileK * kDim * 2, kQueryBytes = kTileQ * kDim * 2;
  // Queries in registers leave their tile to the ring, as its last one.
  static constexpr bool kQueryInRing = kQueryInRegisters;
  static_assert(!kQueryInRing || kQueryBytes == kTileBytes);
  static FLASHQ_HD constexpr int query_offset(int ring) {
    return kQueryInRing ? (ring - 1) * kTileBytes : ring * kTileBytes;
  }
  static FLASHQ_HD constexpr int tiles_bytes(int ring) { return ring * kTileBytes + (kQueryInRing ? 0 : kQueryBytes); }
};

// Shared memory, in this order: a ring of tiles of K and V (kTileK, kDim), at least 2; Q (kTileQ, kDim), later the
// output; the rest.
template <class Shape, class Keys> struct Shared {
  RowBlock block;
  int64_t partial;  // -1: the block has all keys of its rows
  bool idle;        // no rows, or no keys in this split
  RowPlace places[Shape::kTileQ];
  TileRange seen[Shape::kTileQ];  // by the rows, in a tile that needs a mask
  typename Keys::State keys;

  static constexpr int bytes(int ring) { return Shape::tiles_bytes(ring) + static_cast<int>(sizeof(Shared)); }
};

template <class Shape, bool kScattered> using KeysOf =
    std::conditional_t<kScattered, ScatteredRows<Shape::kDim, Shape::kTileK, Shape::kThreads>,
                       DenseRows<Shape::kDim, Shape::kTileK, Shape::kThreads>>;

struct Work {
  int64_t tile, kv_head;
  int split;
};

// Blocks start in the order of their index: within a section longest rows first (the last ones, if causal), so that
// the SMs end together.
__device__ __forceinline__ Work work_of(const PrefillArguments& a) {
  const QueryView& q = a.p.query;
  const int64_t block = blockIdx.x;
  const int split = static_cast<int>(blockIdx.y);
  if (q.cu_seqlens_q.given()) {
    const Quotient at = divide(block, q.kv_heads);
    return {a.row_tiles - 1 - at.quotient, at.remainder, split};
  }
  const int64_t tiles = divide(a.row_tiles, q.batch).quotient;  // of a sequence
  const Quotient at = divide(block, a.section * tiles);
  const int64_t first = at.quotient * a.section, pairs = min_of(a.section, q.batch * q.kv_heads - first);
  const Quotient in = divide(at.remainder, pairs);
  const Quotient pair = divide(first + in.remainder, q.kv_heads);
  return {pair.quotient * tiles + tiles - 1 - in.quotient, pair.remainder, split};
}

__device__ __forceinline__ void wait_for_tile(int ring) {
  if (ring == 4) {
    ptx::cp_async_wait<2>();
  } else if (ring == 3) {
    ptx::cp_async_wait<1>();
  } else {
    ptx::cp_async_wait<0>();
  }
  __syncthreads();
}

// T: Float16, Bfloat16.
template <class T, class Shape, bool kScattered> __global__ void __launch_bounds__(Shape::kThreads, Shape::kBlocks)
    prefill_kernel(const __grid_constant__ PrefillArguments args) {
  constexpr int kDim = Shape::kDim, kM = Shape::kM, kTileQ = Shape::kTileQ, kTileK = Shape::kTileK;
  constexpr int kPart = Shape::kPart, kLead = Shape::kLead;
  using Tile = SharedTile<kDim>;
  using Keys = KeysOf<Shape, kScattered>;
  extern __shared__ __align__(1024) unsigned char tiles_memory[];
  const Attention16Params& p = args.p;
  const int ring = args.ring;
  const uint32_t kv_tiles = ptx::shared_address(tiles_memory), q_tile = kv_tiles + Shape::query_offset(ring);
  auto& shared = *reinterpret_cast<Shared<Shape, Keys>*>(tiles_memory + Shape::tiles_bytes(ring));

  // Which rows, and which keys they see.
  if (threadIdx.x < 32) {
    const Work work = work_of(args);
    RowBlock block(p, locate_row_tile(p, kTileQ, work.tile), work.kv_head, kTileQ, kTileK);
    const bool whole = block.split_count(args.splits.count) == 1;
    if (!whole) block.take_split(work.split, args.splits.count);
    if (threadIdx.x == 0) {
      shared.block = block;
      shared.idle = block.sequence.empty() || (work.split > 0 && (whole || block.tiles == 0));
      shared.partial = whole ? -1 : work.tile * p.query.kv_heads + work.kv_head;
      if constexpr (kScattered)
        shared.keys.narrow = args.narrow_kv;
      else
        Keys::prepare(shared.keys, p, block);
    }
  }
  __syncthreads();
  const RowBlock& block = shared.block;
  if (shared.idle) return;
  const int tiles = block.tiles;
  const int warp_row = static_cast<int>(threadIdx.x) / 32 * Shape::kWarpRows;
  {
    const int row = warp_row + static_cast<int>(threadIdx.x) % Shape::kWarpRows;
    const RowPlace place = block.place(row);
    shared.places[row] = place;
    if (tiles > 0)
      load_queries<kDim, Shape::kWarpRows, kScattered>(q_tile, p.query, block, place, warp_row, args.narrow_q);
    __syncwarp();
  }
  if constexpr (kScattered) {
    Keys::find(shared.keys, 0, p, block);
    Keys::find(shared.keys, 1, p, block);
    __syncthreads();
  }

  // Step 2 i is K of tile i, step 2 i + 1 its V.
  const auto load_tile = [&](int step, int slot) {
    if (step < 2 * tiles)
      Keys::load(kv_tiles + slot * Shape::kTileBytes, step / 2, tiles, step % 2 != 0, shared.keys, p);
    ptx::cp_async_commit();
  };
  for (int step = 0; step < ring - 1; ++step) load_tile(step, step);
  int slot = 0;
  const auto load_next = [&](int step) { load_tile(step + ring - 1, slot == 0 ? ring - 1 : slot - 1); };
  const auto next_tile = [&] {
    const uint32_t tile = kv_tiles + slot * Shape::kTileBytes;
    slot = slot + 1 == ring ? 0 : slot + 1;
    return tile;
  };

  const bool upper = threadIdx.x % 32 >= 16, odd = threadIdx.x / 8 % 2 != 0;  // of the lane's tile of four
  const uint32_t q_lane = q_tile + Tile::lane_offset(warp_row, upper, odd);
  const uint32_t k_lane = Tile::lane_offset(0, odd, upper), v_lane = Tile::lane_offset(0, upper, odd);

  uint32_t query[kM][kDim / 16][4];  // (16 kM, kDim), where registers hold it
  const auto load_query = [&](int c) {
#pragma unroll
    for (int m = 0; m < kM; ++m) ptx::ldmatrix_x4(query[m][c], (q_lane ^ 32 * c) + m * 16 * Tile::kRowBytes);
  };
  if constexpr (Shape::kQueryInRegisters) {
    wait_for_tile(ring);
#pragma unroll
    for (int c = 0; c < kDim / 16; ++c) load_query(c);
  }
  float acc[kM][kDim / 8][4] = {};  // (16 kM, kDim)
  RowStates<kM> state;
  for (int i = 0; i < tiles; ++i) {
    wait_for_tile(ring);
    if constexpr (kScattered)
      if (ring > 2) Keys::find(shared.keys, i + 2, p, block);
    load_next(2 * i);

    // Each lane finds what one row sees now, because registers are scarce once there are scores.
    bool masked = i < block.clear_begin || i >= block.clear_end;
    if constexpr (kScattered) masked |= !Keys::all_found(shared.keys.found[i % 3]);
    if (masked) {
      const int row = warp_row + ptx::fresh_thread() % Shape::kWarpRows;
      const KeyRange keys = block.visible(shared.places[row]);
      shared.seen[row] = range_in_tile(keys, block.first_key + int64_t{i} * kTileK, kTileK);
      __syncwarp();
    }

    // S = Q K^T
    float score[kM][kTileK / 8][4] = {};  // (16 kM, kTileK)
    const uint32_t k_tile = next_tile() + k_lane;
    constexpr int kKeyParts = kTileK / 16 / kPart, kKeySteps = kDim / 16 * kKeyParts;  // of 16 columns, 16 kPart keys
    uint32_t k[kLead + 1][kPart][4];
    const auto load_keys = [&](int step) {
      const int c = step / kKeyParts, first = step % kKeyParts * kPart;
      if (!Shape::kQueryInRegisters && first == 0) load_query(c);
#pragma unroll
      for (int n = 0; n < kPart; ++n)
        ptx::ldmatrix_x4(k[step % (kLead + 1)][n], (k_tile ^ 32 * c) + (first + n) * 16 * Tile::kRowBytes);
    };
    if constexpr (kLead > 0) load_keys(0);
#pragma unroll
    for (int step = 0; step < kKeySteps; ++step) {
      if (step + kLead < kKeySteps) load_keys(step + kLead);
      const int c = step / kKeyParts, first = step % kKeyParts * kPart;
#pragma unroll
      for (int m = 0; m < kM; ++m)
#pragma unroll
        for (int n = 0; n < kPart; ++n) {
          const auto& keys = k[step % (kLead + 1)][n];
          ptx::mma_16x8x16<T>(score[m][2 * (first + n)], query[m][c], keys[0], keys[1]);
          ptx::mma_16x8x16<T>(score[m][2 * (first + n) + 1], query[m][c], keys[2], keys[3]);
        }
    }

    // S scaled and masked, its maxima
    float factor = args.rule.factor;
    if (masked || !args.rule.plain) {
      args.rule.apply(score);
      factor = 1;
    }
    if (masked) {
#pragma unroll
      for (int m = 0; m < kM; ++m)
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          mask_row(score[m], r, shared.seen[warp_row + 16 * m + 8 * r + ptx::fresh_thread() % 32 / 4]);
          if constexpr (kScattered) {
            const auto& found = shared.keys.found[i % 3];
            if (!Keys::all_found(found)) mask_row(score[m], r, found);
          }
        }
    }
    raise_maxima(score, factor, state, acc);

    // P = 2^(S - max)
    uint32_t weight[kTileK / 16][kM][4];  // (16 kM, 16) each
    const auto weigh_keys = [&](int c) {
#pragma unroll
      for (int m = 0; m < kM; ++m)
        weigh<T>(score[m][2 * c], score[m][2 * c + 1], factor, state.max[m], state.sum[m], weight[c][m]);
    };
    if constexpr (!Shape::kInterleave) {
#pragma unroll
      for (int c = 0; c < kTileK / 16; ++c) weigh_keys(c);
    }

    // O += P V
    wait_for_tile(ring);
    if constexpr (kScattered)
      if (ring == 2) Keys::find(shared.keys, i + 2, p, block);  // values of tile i were loaded just before
    load_next(2 * i + 1);
    const uint32_t v_tile = next_tile() + v_lane;
    constexpr int kValueParts = kDim / 16 / kPart,
                  kValueSteps = kTileK / 16 * kValueParts;  // of 16 keys, 16 kPart columns
    uint32_t v[kLead + 1][kPart][4];
    const auto load_values = [&](int step) {
      const int c = step / kValueParts, first = step % kValueParts * kPart;
#pragma unroll
      for (int n = 0; n < kPart; ++n)
        ptx::ldmatrix_x4_trans(v[step % (kLead + 1)][n], (v_tile ^ 32 * (first + n)) + c * 16 * Tile::kRowBytes);
    };
    if constexpr (kLead > 0) load_values(0);
#pragma unroll
    for (int step = 0; step < kValueSteps; ++step) {
      const int c = step / kValueParts, first = step % kValueParts * kPart;
      if (Shape::kInterleave && first == 0) weigh_keys(c);
      if (step + kLead < kValueSteps) load_values(step + kLead);
#pragma unroll
      for (int m = 0; m < kM; ++m)
#pragma unroll
        for (int n = 0; n < kPart; ++n) {
          const auto& values = v[step % (kLead + 1)][n];
          ptx::mma_16x8x16<T>(acc[m][2 * (first + n)], weight[c][m], values[0], values[1]);
          ptx::mma_16x8x16<T>(acc[m][2 * (first + n) + 1], weight[c][m], values[2], values[3]);
        }
    }
  }
  bool all_found = true;
  if constexpr (kScattered) all_found = Keys::none_missing(shared.keys);
  if (shared.partial >= 0) {
    const Partial to(args.splits, shared.partial, static_cast<int>(blockIdx.y));
    store_partial<kDim, kM>(to, warp_row, state, acc, all_found);
    return;
  }
  if constexpr (Shape::kQueryInRing) __syncthreads();  // others may still read values there
  finish_rows<T, kDim, kM>(p, block, shared.places, warp_row, state, acc, tiles_memory + Shape::query_offset(ring),
                           all_found);
  copy_lone_values<T>(p, block, shared.places, warp_row, Shape::kWarpRows);
}

// The longest ring with which kBlocks blocks fit an SM, or else one; 0: not even one fits.
template <class Shared, class Shape> int choose_ring(const Device& device) {
  constexpr int64_t kReserved = 1024;  // of each block; an SM has that much more than a block can have
  for (const int64_t blocks : {Shape::kBlocks, 1})
    for (int ring = Shape::kMaxRing; ring >= 2; --ring)
      if (blocks * (Shared::bytes(ring) + kReserved) <= device.shared_bytes + kReserved) return ring;
  return 0;
}

template <class T, class Shape, bool kScattered> Status launch_kernel(PrefillArguments args, const Device& device,
                                                                      const Launch& launch) {
  constexpr auto kKernel = prefill_kernel<T, Shape, kScattered>;
  const auto stream = static_cast<cudaStream_t>(launch.stream);
  using Memory = Shared<Shape, KeysOf<Shape, kScattered>>;
  args.ring = choose_ring<Memory, Shape>(device);
  if (args.ring == 0) return refuse("device", kMoreShared, device.shared_bytes);
  const int bytes = Memory::bytes(args.ring);
  opt_in<kKernel>(launch.device, bytes);
  const dim3 grid(static_cast<unsigned>(args.row_tiles * args.p.query.kv_heads),
                  static_cast<unsigned>(args.splits.count));
  kKernel<<<grid, Shape::kThreads, static_cast<size_t>(bytes), stream>>>(args);
  const Status status = launch_status();
  if (!status.ok() || args.splits.count == 1) return status;
  return combine_splits(args.p, args.splits, args.row_tiles, stream);
}

template <class T, class Shape> Status launch_kernel(const PrefillArguments& args, const Device& device,
                                                     const Launch& launch) {
  const bool scattered = args.p.kv.block_table.given() || args.narrow_q || args.narrow_kv;
  return scattered ? launch_kernel<T, Shape, true>(args, device, launch)
                   : launch_kernel<T, Shape, false>(args, device, launch);
}

}  // namespace

template <int kDim> PrefillPlan plan_prefill_sm80(const Attention16Params& p) {
  constexpr int kTileQ = Shape<kDim>::kTileQ;
  return {.row_tiles = count_row_tiles(p.query, kTileQ),
          .splits = {.count = count_splits(p, kTileQ, Shape<kDim>::kTileK),
                     .tile_rows = kTileQ,
                     .tile_keys = Shape<kDim>::kTileK,
                     .width = kDim,
                     .partials = static_cast<float*>(p.scratch)}};
}

template <int kDim>
Status launch_prefill_sm80(const PrefillArguments& args, const Device& device, const Launch& launch) {
  return args.p.query.dtype == Dtype::kFloat16 ? launch_kernel<Float16, Shape<kDim>>(args, device, launch)
                                               : launch_kernel<Bfloat16, Shape<kDim>>(args, device, launch);
}

}  // namespace flashq::cuda
