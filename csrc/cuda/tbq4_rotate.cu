// tbq4_rotate: the block rotation of queries, or its inverse, for rows of any strides.
#include <cuda_runtime_api.h>

#include "cuda/kernels.h"
#include "cuda/launch.h"
#include "cuda/tbq4/lanes.cuh"
#include "cuda/tbq4/rows.cuh"

namespace flashq::cuda {
namespace {

struct RotateParams {
  Rows x;
  void* out;
  int64_t blocks;
  int row_blocks;
};

template <class T, int kWidth, bool kVector, bool kInverse> __global__ void __launch_bounds__(
    BlockLanes<kWidth>::kThreads) rotate_kernel(const __grid_constant__ RotateParams p) {
  using Lanes = BlockLanes<kWidth>;
  using Storage = typename T::Storage;
  constexpr int kValues = Lanes::kValues;
  const Lanes lanes;
  Lanes::for_each_block(p.blocks, [&](int64_t block) {
    float x[kValues] = {};
    if (block < p.blocks) {
      const BlockPlace place = place_of<kWidth>(block, p.row_blocks);
      load_values<T, kVector>(p.x.template row<Storage>(place.row) + place.column + lanes.lane() * kValues, x);
    }
    lanes.template rotate<kInverse>(x);
    if (block < p.blocks) store_values<T>(x, static_cast<Storage*>(p.out) + block * kWidth + lanes.lane() * kValues);
  });
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
      using Lanes = BlockLanes<width.value>;
      const int row_blocks = static_cast<int>(p.x.head_dim) / width.value;
      const RotateParams params{rows, p.out, p.x.rows * row_blocks, row_blocks};
      constexpr bool kVector = aligned.value != 0;
      if (p.inverse)
        rotate_kernel<T, width.value, kVector, true>
            <<<Lanes::grid_of(params.blocks), Lanes::kThreads, 0, stream>>>(params);
      else
        rotate_kernel<T, width.value, kVector, false>
            <<<Lanes::grid_of(params.blocks), Lanes::kThreads, 0, stream>>>(params);
    });
  });
  return launch_status();
}

}  // namespace flashq::cuda
