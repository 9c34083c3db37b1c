// tbq4_rotate: the block rotation of queries, or its inverse, for rows of any strides.
#include <cuda_runtime_api.h>

#include "cuda/kernels.h"
#include "cuda/launch.h"
#include "cuda/tbq4/lanes.cuh"
#include "cuda/tbq4/rows.cuh"

namespace flashq::cuda {
namespace {

constexpr int kThreads = 128;

struct RotateParams {
  Rows x;
  void* out;
  int64_t blocks;
  int row_blocks;
};

template <class T, int kWidth, bool kVector, bool kInverse> __global__ void __launch_bounds__(kThreads)
    rotate_kernel(const __grid_constant__ RotateParams p) {
  using Lanes = BlockLanes<kWidth>;
  using Storage = typename T::Storage;
  constexpr int kValues = Lanes::kValues, kBlocks = kThreads / Lanes::kLanes;
  const Lanes lanes;
  for (int64_t first = int64_t{blockIdx.x} * kBlocks; first < p.blocks; first += int64_t{gridDim.x} * kBlocks) {
    const int64_t block = first + static_cast<int>(threadIdx.x) / Lanes::kLanes;
    float x[kValues] = {};
    if (block < p.blocks) {
      const BlockPlace place = place_of<kWidth>(block, p.row_blocks);
      load_values<T, kVector>(p.x.template row<Storage>(place.row) + place.column + lanes.lane() * kValues, x);
    }
    lanes.template rotate<kInverse>(x);
    if (block < p.blocks) store_values<T>(x, static_cast<Storage*>(p.out) + block * kWidth + lanes.lane() * kValues);
  }
}

}  // namespace

Status tbq4_rotate(const Tbq4RotateParams& p, const Launch& launch) {
  if (const Status status = enter(launch); !status.ok()) return status;
  if (p.x.rows == 0) return {};
  const auto stream = static_cast<cudaStream_t>(launch.stream);
  with_dtype(p.x.dtype, [&](auto t) {
    using T = decltype(t);
    const Rows rows(p.x, sizeof(typename T::Storage));
    with_width(p.x.head_dim, rows.aligned(kVectorBytes), [&](auto width, auto aligned) {
      constexpr int kBlocks = kThreads / BlockLanes<width.value>::kLanes;
      const int row_blocks = static_cast<int>(p.x.head_dim) / width.value;
      const RotateParams params{rows, p.out, p.x.rows * row_blocks, row_blocks};
      const auto grid = static_cast<unsigned>(min_of<int64_t>(ceil_div(params.blocks, kBlocks), INT32_MAX));
      constexpr bool kVector = aligned.value != 0;
      if (p.inverse)
        rotate_kernel<T, width.value, kVector, true><<<grid, kThreads, 0, stream>>>(params);
      else
        rotate_kernel<T, width.value, kVector, false><<<grid, kThreads, 0, stream>>>(params);
    });
  });
  return launch_status();
}

}  // namespace flashq::cuda
