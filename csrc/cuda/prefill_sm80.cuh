// Attention for many rows on tensor cores of compute capability 8.0 and newer: FlashAttention-2's structure.
//
// A block takes a tile of rows of one sequence and KV head and walks over the tiles of keys that some of its rows see.
// K and V tiles pass through a ring in shared memory (cp.async), from there to the tensor cores by ldmatrix; scores
// and weights never leave the registers. Two or three blocks on an SM hide each other's softmax and waits.
#pragma once
#include <cuda_runtime_api.h>

#include <cstdio>
#include <type_traits>

#include "cuda/finish_rows.cuh"
#include "cuda/kv_rows.cuh"
#include "cuda/launch.h"
#include "cuda/ptx/mma.cuh"
#include "cuda/sequences.cuh"
#include "cuda/softmax_step.cuh"
#include "cuda/tile_copy.cuh"

namespace flashq::cuda {

struct PrefillArguments {
  Attention16Params p;
  ScoreRule rule;
  int64_t row_tiles;         // of a KV head; of all sequences
  int64_t section;           // (sequence, KV head) pairs whose K and V share the L2 cache
  int ring;                  // tiles of K and V in shared memory
  bool narrow_q, narrow_kv;  // no 16-byte loads
};

// For head dims up to kDim, the instance of prefill_sm80_d<kDim>.cu.
template <int kDim> [[nodiscard]] Status launch_prefill_sm80(const PrefillArguments&, const Device&, cudaStream_t);

namespace {

template <int kHeadDim> struct Shape {
  static constexpr int kDim = kHeadDim;
  static constexpr int kWarps = 4, kThreads = 32 * kWarps;
  // 32 rows a warp: a K or V fragment from shared memory then serves two products. Of 256 columns only 16 rows fit the
  // registers.
  static constexpr int kM = kDim == 256 ? 1 : 2;
  static constexpr int kWarpRows = 16 * kM, kTileQ = kWarps * kWarpRows;
  static constexpr int kTileK = 64;
  static constexpr int kBlocks = 2;  // on an SM
  static constexpr int kMaxRing = 4;
  static constexpr int kTileBytes = kTileK * kDim * 2, kQueryBytes = kTileQ * kDim * 2;
};

// Shared memory, in this order: Q (kTileQ, kDim), later the output; a ring of tiles of K and V (kTileK, kDim), at least
// 2; the rest.
template <class Shape, class Keys> struct Shared {
  RowBlock block;
  RowPlace places[Shape::kTileQ];
  typename Keys::State keys;

  static constexpr int bytes(int ring) {
    return Shape::kQueryBytes + ring * Shape::kTileBytes + static_cast<int>(sizeof(Shared));
  }
};

template <class Shape, bool kScattered> using KeysOf =
    std::conditional_t<kScattered, ScatteredRows<Shape::kDim, Shape::kTileK, Shape::kThreads>,
                       DenseRows<Shape::kDim, Shape::kTileK, Shape::kThreads>>;

struct Work { int64_t tile, kv_head; };

// Blocks start in the order of their index: within a section longest rows first (the last ones, if causal), so that
// the SMs end together.
__device__ __forceinline__ Work work_of(const PrefillArguments& a, int64_t block) {
  const QueryView& q = a.p.query;
  if (q.cu_seqlens_q.given()) {
    const Quotient at = divide(block, q.kv_heads);
    return {a.row_tiles - 1 - at.quotient, at.remainder};
  }
  const int64_t tiles = divide(a.row_tiles, q.batch).quotient;  // of a sequence
  const Quotient at = divide(block, a.section * tiles);
  const int64_t first = at.quotient * a.section, pairs = min_of(a.section, q.batch * q.kv_heads - first);
  const Quotient in = divide(at.remainder, pairs);
  const Quotient pair = divide(first + in.remainder, q.kv_heads);
  return {pair.quotient * tiles + tiles - 1 - in.quotient, pair.remainder};
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
  using Tile = SharedTile<kDim>;
  using Keys = KeysOf<Shape, kScattered>;
  extern __shared__ __align__(1024) unsigned char tiles_memory[];
  const Attention16Params& p = args.p;
  const int ring = args.ring;
  const uint32_t q_tile = ptx::shared_address(tiles_memory), kv_tiles = q_tile + Shape::kQueryBytes;
  auto& shared = *reinterpret_cast<Shared<Shape, Keys>*>(tiles_memory + Shape::kQueryBytes + ring * Shape::kTileBytes);

  // Which rows, and which keys they see.
  if (threadIdx.x < 32) {
    const Work work = work_of(args, blockIdx.x);
    const RowBlock block(p, locate_row_tile(p, kTileQ, work.tile), work.kv_head, kTileQ, kTileK);
    if (threadIdx.x == 0) {
      shared.block = block;
      if constexpr (kScattered)
        shared.keys.narrow = args.narrow_kv;
      else
        Keys::prepare(shared.keys, p, block);
    }
  }
  __syncthreads();
  const RowBlock& block = shared.block;
  if (block.sequence.empty()) return;
  const int tiles = block.tiles;
  block.place_rows(shared.places, kTileQ);
  if constexpr (kScattered) {
    Keys::find(shared.keys, 0, p, block);
    Keys::find(shared.keys, 1, p, block);
  }
  __syncthreads();
  if (tiles > 0)
    load_queries<kDim, kTileQ, Shape::kThreads, kScattered>(q_tile, p.query, block, shared.places, args.narrow_q);

  int load_slot = 0, use_slot = 0;
  const auto load_tile = [&](int step) {  // K of tile 0, V of tile 0, K of tile 1, ...
    if (step < 2 * tiles)
      Keys::load(kv_tiles + load_slot * Shape::kTileBytes, step / 2, tiles, step % 2 != 0, shared.keys, p);
    ptx::cp_async_commit();
    load_slot = load_slot + 1 == ring ? 0 : load_slot + 1;
  };
  const auto next_tile = [&] {
    const uint32_t tile = kv_tiles + use_slot * Shape::kTileBytes;
    use_slot = use_slot + 1 == ring ? 0 : use_slot + 1;
    return tile;
  };
  for (int step = 0; step < ring - 1; ++step) load_tile(step);

  const int warp_row = static_cast<int>(threadIdx.x) / 32 * Shape::kWarpRows;
  const bool upper = threadIdx.x % 32 >= 16, odd = threadIdx.x / 8 % 2 != 0;  // of the lane's tile of four
  const uint32_t q_lane = q_tile + Tile::lane_offset(warp_row, upper, odd);
  const uint32_t k_lane = Tile::lane_offset(0, odd, upper), v_lane = Tile::lane_offset(0, upper, odd);

  float acc[kM][kDim / 8][4] = {};  // (16 kM, kDim)
  RowStates<kM> state;
  for (int i = 0; i < tiles; ++i) {
    wait_for_tile(ring);
    if constexpr (kScattered)
      if (ring > 2) Keys::find(shared.keys, i + 2, p, block);
    load_tile(2 * i + ring - 1);

    // S = Q K^T
    float score[kM][kTileK / 8][4] = {};  // (16 kM, kTileK)
    const uint32_t k_tile = next_tile() + k_lane;
#pragma unroll
    for (int c = 0; c < kDim / 16; ++c) {
      uint32_t q[kM][4];
#pragma unroll
      for (int m = 0; m < kM; ++m) ptx::ldmatrix_x4(q[m], (q_lane ^ 32 * c) + m * 16 * Tile::kRowBytes);
#pragma unroll
      for (int n = 0; n < kTileK / 16; ++n) {
        uint32_t k[4];
        ptx::ldmatrix_x4(k, (k_tile ^ 32 * c) + n * 16 * Tile::kRowBytes);
#pragma unroll
        for (int m = 0; m < kM; ++m) {
          ptx::mma_16x8x16<T>(score[m][2 * n], q[m], k[0], k[1]);
          ptx::mma_16x8x16<T>(score[m][2 * n + 1], q[m], k[2], k[3]);
        }
      }
    }

    // P = 2^(S - max)
    bool masked = i < block.clear_begin || i >= block.clear_end;
    if constexpr (kScattered) masked |= Keys::found(shared.keys, i) != ~uint64_t{0};
    float factor = args.rule.factor;
    if (masked || !args.rule.plain) {
      factor = 1;
#pragma unroll
      for (int m = 0; m < kM; ++m)
#pragma unroll
        for (int n = 0; n < kTileK / 8; ++n)
#pragma unroll
          for (int j = 0; j < 4; ++j) score[m][n][j] = args.rule.score(score[m][n][j]);
    }
    if (masked) {
#pragma unroll
      for (int m = 0; m < kM; ++m)
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          const int row = warp_row + 16 * m + 8 * r + threadIdx.x % 32 / 4;
          const KeyRange keys = block.visible(shared.places[row]);
          mask_scores(score[m], r, range_in_tile(keys, block.first_key + int64_t{i} * kTileK, kTileK));
          if constexpr (kScattered) mask_scores(score[m], r, Keys::found(shared.keys, i));
        }
    }
    softmax_step(score, factor, state, acc);

    wait_for_tile(ring);
    if constexpr (kScattered)
      if (ring == 2) Keys::find(shared.keys, i + 2, p, block);  // values of tile i were loaded just before
    load_tile(2 * i + ring);

    // O += P V
    const uint32_t v_tile = next_tile() + v_lane;
#pragma unroll
    for (int c = 0; c < kTileK / 16; ++c) {
      uint32_t weight[kM][4];
#pragma unroll
      for (int m = 0; m < kM; ++m)
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const auto& pair = score[m][2 * c + j / 2];
          weight[m][j] = ptx::pack<T>(pair[j % 2 * 2], pair[j % 2 * 2 + 1]);
        }
#pragma unroll
      for (int n = 0; n < kDim / 16; ++n) {
        uint32_t v[4];
        ptx::ldmatrix_x4_trans(v, (v_tile ^ 32 * n) + c * 16 * Tile::kRowBytes);
#pragma unroll
        for (int m = 0; m < kM; ++m) {
          ptx::mma_16x8x16<T>(acc[m][2 * n], weight[m], v[0], v[1]);
          ptx::mma_16x8x16<T>(acc[m][2 * n + 1], weight[m], v[2], v[3]);
        }
      }
    }
  }
  bool all_found = true;
  if constexpr (kScattered) all_found = (shared.keys.missing[0] | shared.keys.missing[1]) == 0;
  finish_rows<T, kDim, kM>(p, block, shared.places, warp_row, state, acc, tiles_memory, all_found);
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

Status refuse_device(const Device& device, int bytes) {
  Status status;
  std::snprintf(status.message, sizeof status.message,
                "device: expected %d bytes of shared memory a block for this head dim, got %lld", bytes,
                static_cast<long long>(device.shared_bytes));
  return status;
}

template <class T, class Shape, bool kScattered> Status launch_kernel(PrefillArguments args, const Device& device,
                                                                      cudaStream_t stream) {
  constexpr auto kKernel = prefill_kernel<T, Shape, kScattered>;
  using Memory = Shared<Shape, KeysOf<Shape, kScattered>>;
  args.ring = choose_ring<Memory, Shape>(device);
  if (args.ring == 0) return refuse_device(device, Memory::bytes(2));
  args.row_tiles = count_row_tiles(args.p.query, Shape::kTileQ);
  const int bytes = Memory::bytes(args.ring);
  cudaFuncSetAttribute(kKernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  const auto blocks = static_cast<unsigned>(args.row_tiles * args.p.query.kv_heads);
  kKernel<<<blocks, Shape::kThreads, static_cast<size_t>(bytes), stream>>>(args);
  return launch_status();
}

template <class T, class Shape> Status launch_kernel(const PrefillArguments& args, const Device& device,
                                                     cudaStream_t stream) {
  const bool scattered = args.p.kv.block_table.given() || args.narrow_q || args.narrow_kv;
  return scattered ? launch_kernel<T, Shape, true>(args, device, stream)
                   : launch_kernel<T, Shape, false>(args, device, stream);
}

}  // namespace

template <int kDim>
Status launch_prefill_sm80(const PrefillArguments& args, const Device& device, cudaStream_t stream) {
  return args.p.query.dtype == Dtype::kFloat16 ? launch_kernel<Float16, Shape<kDim>>(args, device, stream)
                                               : launch_kernel<Bfloat16, Shape<kDim>>(args, device, stream);
}

}  // namespace flashq::cuda
