// tbq4_dequantize: codes and norms of any strides back to rows.
#include <cuda_runtime_api.h>

#include "cuda/kernels.h"
#include "cuda/launch.h"
#include "cuda/tbq4/bulk_launch.cuh"
#include "cuda/tbq4/bulk_rows.cuh"
#include "cuda/tbq4/lanes.cuh"
#include "cuda/tbq4/rows.cuh"
#include "cuda/tbq4/whole_block.cuh"

namespace flashq::cuda {
namespace {

struct DequantizeParams {
  Rows codes, norms;
  void* out;
  int64_t blocks;
  int row_blocks;

  template <int kWidth> __device__ __forceinline__ const uint8_t* codes_at(const BlockPlace& place) const {
    return codes.row<uint8_t>(place.row) + place.column / 2;
  }
  template <int kWidth> __device__ __forceinline__ uint16_t norm_at(const BlockPlace& place) const {
    return norms.row<uint16_t>(place.row)[place.column / kWidth];
  }
};

// For few blocks.
template <class T, int kWidth, bool kVector> __global__ void __launch_bounds__(BlockLanes<kWidth>::kThreads)
    dequantize_kernel(const __grid_constant__ DequantizeParams p) {
  using Lanes = BlockLanes<kWidth>;
  constexpr int kValues = Lanes::kValues;
  const Lanes lanes;
  Lanes::for_each_block(p.blocks, [&](int64_t block) {
    uint32_t codes = 0;
    uint16_t norm = 0;
    if (block < p.blocks) {
      const BlockPlace place = place_of<kWidth>(block, p.row_blocks);
      codes = load_codes<kVector>(p.codes_at<kWidth>(place) + lanes.lane() * (kValues / 2));
      norm = p.norm_at<kWidth>(place);
    }
    float x[kValues];
    lanes.decode(codes, norm, x);
    if (block < p.blocks)
      store_values<T>(x, static_cast<typename T::Storage*>(p.out) + block * kWidth + lanes.lane() * kValues);
  });
}

template <class T, int kBlockWidth> struct BulkDecodePlan {
  static constexpr int kWidth = kBlockWidth;
  static constexpr int kRowBytes = kWidth * static_cast<int>(sizeof(typename T::Storage)), kRowStride = kRowBytes + 16;
  static constexpr int kCodeBytes = kWidth / 2, kCodeStride = kCodeBytes + 16;
  static constexpr int kMaxWarps = kWidth == 64 ? 16 : sizeof(typename T::Storage) == 4 ? 8 : 12;

  // Shared memory: the table, then codes and rows of every warp.
  static constexpr int kWarps = 256 * kTableRow, kWarpBytes = 32 * (kRowStride + kCodeStride);
  static constexpr int shared_bytes(int warps) { return kWarps + warps * kWarpBytes; }
};

template <class T, int kWidth> struct DecodeJob : DequantizeParams {
  using Plan = BulkDecodePlan<T, kWidth>;
  int groups;  // of 32 blocks
};

// For many blocks: a thread a block. Codes of the next group arrive in shared memory while this one is decoded; values
// go back through shared memory, so that a warp stores whole rows.
template <class T, int kWidth> __global__ void __launch_bounds__(32 * BulkDecodePlan<T, kWidth>::kMaxWarps, 1)
    bulk_decode_kernel(const __grid_constant__ DecodeJob<T, kWidth> job) {
  using Plan = BulkDecodePlan<T, kWidth>;
  using Storage = typename T::Storage;
  constexpr int kPiece = kVectorBytes / static_cast<int>(sizeof(Storage));
  extern __shared__ __align__(1024) char shared[];
  const int warp = static_cast<int>(threadIdx.x / 32);
  char* const rows = shared + Plan::kWarps + warp * Plan::kWarpBytes;
  char* const codes = rows + 32 * Plan::kRowStride;
  const auto fetch = [&](int group) {
    const int lane = ptx::fresh_lane();
    const int64_t block = int64_t{group} * 32 + lane;
    const char* from = nullptr;
    uint16_t norm = 0;
    if (block < job.blocks) {
      const BlockPlace place = place_of<kWidth>(block, job.row_blocks);
      from = reinterpret_cast<const char*>(job.template codes_at<kWidth>(place));
      norm = job.template norm_at<kWidth>(place);
    }
    start_copies<Plan::kCodeBytes, Plan::kCodeStride>(codes, from, lane);
    return norm;
  };

  const int step = static_cast<int>(gridDim.x * (blockDim.x / 32));
  int group = static_cast<int>(blockIdx.x) + static_cast<int>(gridDim.x) * warp;
  uint16_t next = 0;
  if (group < job.groups) next = fetch(group);
  fill_levels<kWidth>(shared);
  __syncthreads();

  for (; group < job.groups; group += step) {
    const uint16_t norm = next;
    ptx::cp_async_wait<0>();
    __syncwarp();
    const int lane = ptx::fresh_lane();
    uint32_t words[kWidth / 8];
#pragma unroll
    for (int i = 0; i < kWidth / 8; i += 4) {
      const auto four = load<Vector<uint32_t, 4>>(codes + lane * Plan::kCodeStride + 4 * i);
#pragma unroll
      for (int j = 0; j < 4; ++j) words[i + j] = four.value[j];
    }
    __syncwarp();  // every lane holds its codes
    if (group + step < job.groups) next = fetch(group + step);

    float x[kWidth];
    decode_whole<kWidth>(words, norm, shared, x);
#pragma unroll
    for (int i = 0; i < kWidth; i += kPiece) {
      Packed<T, kPiece> piece;
#pragma unroll
      for (int j = 0; j < kPiece; ++j) piece.set(j, x[i + j]);
      store(rows + lane * Plan::kRowStride + i / kPiece * kVectorBytes, piece);
    }
    __syncwarp();
    copy_out<Plan::kRowBytes, Plan::kRowStride>(
        rows, static_cast<char*>(job.out) + int64_t{group} * 32 * Plan::kRowBytes, lane,
        static_cast<int>(min_of<int64_t>(job.blocks - int64_t{group} * 32, 32)));
    __syncwarp();  // before the next group's values
  }
}

}  // namespace

Status tbq4_dequantize(const Tbq4DequantizeParams& p, const Launch& launch) {
  Device device;
  if (const Status status = enter(launch, device); !status.ok()) return status;
  if (p.codes.rows == 0) return {};
  const auto stream = static_cast<cudaStream_t>(launch.stream);
  const Rows codes(p.codes, 1), norms(p.norms, sizeof(uint16_t));
  with_dtype(p.out_dtype, [&](auto t) {
    using T = decltype(t);
    with_width(p.codes.head_dim, codes.aligned(sizeof(uint32_t)), [&](auto width, auto aligned) {
      constexpr int kWidth = width.value;
      const int row_blocks = static_cast<int>(p.codes.head_dim) / kWidth;
      const DequantizeParams params{codes, norms, p.out, p.codes.rows * row_blocks, row_blocks};
      if constexpr (aligned.value != 0) {
        const int groups = codes.aligned(kVectorBytes) ? bulk_groups(params.blocks, device) : 0;
        const DecodeJob<T, kWidth> job{params, groups};
        if (groups > 0 && launch_bulk<bulk_decode_kernel<T, kWidth>>(job, device, launch)) return;
      }
      using Lanes = BlockLanes<kWidth>;
      dequantize_kernel<T, kWidth, aligned.value != 0>
          <<<Lanes::grid_of(params.blocks), Lanes::kThreads, 0, stream>>>(params);
    });
  });
  return launch_status();
}

}  // namespace flashq::cuda
