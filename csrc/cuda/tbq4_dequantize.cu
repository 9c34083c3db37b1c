// tbq4_dequantize: codes and norms of any strides back to rows.
#include <cuda_runtime_api.h>

#include "cuda/kernels.h"
#include "cuda/launch.h"
#include "cuda/ptx/cp_async.cuh"
#include "cuda/ptx/dependent_launch.cuh"
#include "cuda/tbq4/bulk_decode.cuh"
#include "cuda/tbq4/bulk_launch.cuh"
#include "cuda/tbq4/lanes.cuh"
#include "cuda/tbq4/rows.cuh"

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
  template <int kWidth> __device__ __forceinline__ const uint16_t* norm_at(const BlockPlace& place) const {
    return norms.row<uint16_t>(place.row) + place.column / kWidth;
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
      norm = *p.norm_at<kWidth>(place);
    }
    float x[kValues];
    lanes.decode(codes, norm, x);
    if (block < p.blocks)
      store_values<T>(x, static_cast<typename T::Storage*>(p.out) + block * kWidth + lanes.lane() * kValues);
  });
}

template <int kBlockWidth> struct BulkDecodePlan {
  static constexpr int kMaxWarps = kBlockWidth == 64 ? 24 : 16;
  static constexpr int shared_bytes(int) { return kTableBytes; }
};

template <int kBlockWidth> struct DecodeJob : DequantizeParams {
  using Plan = BulkDecodePlan<kBlockWidth>;
  int groups;  // of what a warp decodes at a time
  // From block to block, or -1 where they do not lie evenly.
  int64_t codes_stride, norms_stride;

  struct Source {
    const uint8_t* codes;
    const uint16_t* norm;
  };
  __device__ __forceinline__ Source source(int64_t block) const {
    if (codes_stride >= 0 && norms_stride >= 0)
      return {static_cast<const uint8_t*>(codes.data()) + block * codes_stride,
              static_cast<const uint16_t*>(norms.data()) + block * norms_stride};
    const BlockPlace place = place_of<kBlockWidth>(block, row_blocks);
    return {codes_at<kBlockWidth>(place), norm_at<kBlockWidth>(place)};
  }
};

// For many blocks.
template <class T, int kWidth> __global__ void __launch_bounds__(32 * BulkDecodePlan<kWidth>::kMaxWarps, 1)
    bulk_decode_kernel(const __grid_constant__ DecodeJob<kWidth> job) {
  using Storage = typename T::Storage;
  constexpr int kPiece = kVectorBytes / static_cast<int>(sizeof(Storage));
  using Lanes = DecodeLanes<kWidth, kPiece>;
  extern __shared__ __align__(1024) char shared[];
  ptx::allow_dependents();
  fill_levels<kWidth>(shared);
  const Lanes lanes;
  ptx::wait_for_primary();

  const int lane = static_cast<int>(threadIdx.x) % Lanes::kLanes;
  const auto block_of = [&](int group) {
    return int64_t{group} * Lanes::kBlocks + static_cast<int>(threadIdx.x) % 32 / Lanes::kLanes;
  };
  using Source = typename DecodeJob<kWidth>::Source;
  const auto source_of = [&](int group) -> Source {
    const int64_t block = block_of(group);
    if (block >= job.blocks) return {nullptr, nullptr};
    const Source source = job.source(block);
    return {source.codes + lane * (Lanes::kValues / 2), source.norm};
  };
  uint32_t codes[Lanes::kWords];
  uint16_t norm = 0;
  const auto fetch = [&](int group) {
    const Source source = source_of(group);
    lanes.load_codes(source.codes, codes);
    if (source.norm) norm = *source.norm;
  };
  // What is to be fetched next is on its way to the L2 already: one step is shorter than the way from memory.
  const auto prefetch = [&](int group) {
    const Source source = source_of(group);
    if (!source.codes) return;
    ptx::prefetch_l2(source.codes);
    ptx::prefetch_l2(source.norm);
  };
  const int step = static_cast<int>(gridDim.x * (blockDim.x / 32));
  int group = static_cast<int>(blockIdx.x + gridDim.x * (threadIdx.x / 32));
  if (group < job.groups) fetch(group);
  if (group + step < job.groups) prefetch(group + step);
  __syncthreads();  // the table

  for (; group < job.groups; group += step) {
    float v[Lanes::kValues];
    const uint16_t own_norm = norm;
    uint32_t own_codes[Lanes::kWords];
#pragma unroll
    for (int i = 0; i < Lanes::kWords; ++i) own_codes[i] = codes[i];
    if (group + step < job.groups) fetch(group + step);
    if (group + 2 * step < job.groups) prefetch(group + 2 * step);
    lanes.decode(own_codes, own_norm, shared, v);

    const int64_t block = block_of(group);
    if (block >= job.blocks) continue;
    Storage* const to = static_cast<Storage*>(job.out) + block * kWidth;
#pragma unroll
    for (int i = 0; i < Lanes::kValues; i += kPiece) {
      Packed<T, kPiece> piece;
#pragma unroll
      for (int j = 0; j < kPiece; ++j) piece.set(j, v[i + j]);
      store_global(to + lanes.first_value(i / kPiece), piece);
    }
  }
}

}  // namespace

Status tbq4_dequantize(const Tbq4DequantizeParams& p, const Launch& launch) {
  Device device;
  if (const Status status = enter(launch, device); !status.ok()) return status;
  if (p.codes.rows == 0) return {};
  const Rows codes(p.codes, 1), norms(p.norms, sizeof(uint16_t));
  const auto stream = static_cast<cudaStream_t>(launch.stream);
  with_dtype(p.out_dtype, [&](auto t) {
    using T = decltype(t);
    with_width(p.codes.head_dim, codes.aligned(sizeof(uint32_t)), [&](auto width, auto aligned) {
      constexpr int kWidth = width.value;
      const int row_blocks = static_cast<int>(p.codes.head_dim) / kWidth;
      const DequantizeParams params{codes, norms, p.out, p.codes.rows * row_blocks, row_blocks};
      if constexpr (aligned.value != 0) {
        constexpr int kPiece = kVectorBytes / static_cast<int>(sizeof(typename T::Storage));
        const int groups = codes.aligned(2 * sizeof(uint32_t))
                               ? bulk_groups(params.blocks, DecodeLanes<kWidth, kPiece>::kBlocks, device)
                               : 0;
        const DecodeJob<kWidth> job{params, groups, codes.even_stride(kWidth / 2, row_blocks),
                                    norms.even_stride(1, row_blocks)};
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
