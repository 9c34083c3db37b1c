// tbq4_quantize: rows of any strides to codes and norms.
#include <cuda_runtime_api.h>

#include "cuda/kernels.h"
#include "cuda/launch.h"
#include "cuda/tbq4/bulk_encode.cuh"
#include "cuda/tbq4/bulk_launch.cuh"
#include "cuda/tbq4/lanes.cuh"
#include "cuda/tbq4/rows.cuh"

namespace flashq::cuda {
namespace {

struct QuantizeParams {
  Rows x;
  uint8_t* codes;
  uint16_t* norms;
  int64_t blocks;
  int row_blocks;
};

template <class T, int kWidth, bool kVector> __global__ void __launch_bounds__(BlockLanes<kWidth>::kThreads)
    quantize_kernel(const __grid_constant__ QuantizeParams p) {
  using Lanes = BlockLanes<kWidth>;
  constexpr int kValues = Lanes::kValues;
  const Lanes lanes;
  Lanes::for_each_block(p.blocks, [&](int64_t block) {
    float x[kValues] = {};
    if (block < p.blocks) {
      const BlockPlace place = place_of<kWidth>(block, p.row_blocks);
      load_values<T, kVector>(p.x.template row<typename T::Storage>(place.row) + place.column + lanes.lane() * kValues,
                              x);
    }
    const auto [codes, norm] = lanes.encode(x);
    if (block < p.blocks) {
      store_codes<true>(p.codes + block * (kWidth / 2) + lanes.lane() * (kValues / 2), codes);
      if (lanes.lane() == 0) p.norms[block] = norm;
    }
  });
}

template <class T, int kBlockWidth> struct QuantizeJob : QuantizeParams {
  using Plan = BulkEncodePlan<T, kBlockWidth>;
  static constexpr bool kHasOffsets = false;
  const char* first;
  int64_t even_stride;  // bytes from block to block, or -1: they do not lie evenly
  int groups;

  struct Place { int64_t first; };
  __device__ __forceinline__ Place place(int group) const { return {int64_t{group} * Plan::kBlocks}; }
  __device__ __forceinline__ bool lies_evenly() const { return even_stride >= 0; }
  __device__ __forceinline__ EvenRows even_rows(const Place& place) const {
    return {first + place.first * even_stride, even_stride,
            static_cast<int>(min_of<int64_t>(blocks - place.first, Plan::kBlocks))};
  }
  __device__ __forceinline__ const void* source(const Place& group, int own) const {
    const int64_t block = group.first + own;
    if (block >= blocks) return nullptr;
    const BlockPlace place = place_of<kBlockWidth>(block, row_blocks);
    return x.template row<typename T::Storage>(place.row) + place.column;
  }
  __device__ __forceinline__ void start_slot(const Place&, int, int64_t*) const {}
  __device__ __forceinline__ int64_t target(const Place& group, int own, int64_t) const {
    const int64_t block = group.first + own;
    return block < blocks ? block : -1;
  }
  __device__ __forceinline__ uint8_t* codes(const Place&) const { return QuantizeParams::codes; }
  __device__ __forceinline__ uint16_t* norms(const Place&) const { return QuantizeParams::norms; }
};

// False: too few blocks, or no room.
template <class T, int kWidth> bool quantize_in_bulk(const QuantizeParams& params, const Device& device,
                                                     const Launch& launch) {
  using Job = QuantizeJob<T, kWidth>;
  const int groups = bulk_groups(params.blocks, Job::Plan::kBlocks, device);
  if (groups == 0) return false;
  const int64_t stride = params.x.even_stride(kWidth, params.row_blocks);
  const int64_t bytes = stride < 0 ? -1 : stride * static_cast<int64_t>(sizeof(typename T::Storage));
  const Job job{params, static_cast<const char*>(params.x.data()), bytes, groups};
  return launch_bulk<bulk_encode_kernel<Job>>(job, device, launch);
}

}  // namespace

Status tbq4_quantize(const Tbq4QuantizeParams& p, const Launch& launch) {
  Device device;
  if (const Status status = enter(launch, device); !status.ok()) return status;
  if (p.x.rows == 0) return {};
  const auto stream = static_cast<cudaStream_t>(launch.stream);
  with_dtype(p.x.dtype, [&](auto t) {
    using T = decltype(t);
    const Rows rows(p.x, sizeof(typename T::Storage));
    with_width(p.x.head_dim, rows.aligned(kVectorBytes), [&](auto width, auto aligned) {
      constexpr int kWidth = width.value;
      const int row_blocks = static_cast<int>(p.x.head_dim) / kWidth;
      const QuantizeParams params{rows, p.codes, p.norms, p.x.rows * row_blocks, row_blocks};
      if constexpr (aligned.value != 0) {
        if (quantize_in_bulk<T, kWidth>(params, device, launch)) return;
      }
      using Lanes = BlockLanes<kWidth>;
      quantize_kernel<T, kWidth, aligned.value != 0>
          <<<Lanes::grid_of(params.blocks), Lanes::kThreads, 0, stream>>>(params);
    });
  });
  return launch_status();
}

}  // namespace flashq::cuda
