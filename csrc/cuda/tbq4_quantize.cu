// tbq4_quantize: rows of any strides to codes and norms.
#include <cuda_runtime_api.h>

#include "cuda/kernels.h"
#include "cuda/launch.h"
#include "cuda/tbq4/lanes.cuh"
#include "cuda/tbq4/rows.cuh"

namespace flashq::cuda {
namespace {

constexpr int kThreads = 128;

template <class T, int kWidth, bool kVector> __global__ void __launch_bounds__(kThreads)
    quantize_kernel(const __grid_constant__ Tbq4QuantizeParams p) {
  using Lanes = BlockLanes<kWidth>;
  constexpr int kValues = Lanes::kValues, kBlocks = kThreads / Lanes::kLanes;
  const Lanes lanes;
  const int row_blocks = static_cast<int>(p.x.head_dim) / kWidth;  // 1 or 2
  const int64_t blocks = p.x.rows * row_blocks;
  for (int64_t first = int64_t{blockIdx.x} * kBlocks; first < blocks; first += int64_t{gridDim.x} * kBlocks) {
    const int64_t block = first + static_cast<int>(threadIdx.x) / Lanes::kLanes;
    float x[kValues] = {};
    if (block < blocks) {
      const int64_t row = row_blocks == 1 ? block : block >> 1;
      const int64_t column = row_blocks == 1 ? 0 : (block & 1) * kWidth;
      load_values<T, kVector>(static_cast<const typename T::Storage*>(p.x.data) + row_offset(p.x, row) + column +
                                  lanes.lane() * kValues,
                              x);
    }
    const auto [codes, norm] = lanes.encode(x);
    if (block < blocks) {
      store_codes<true>(p.codes + block * (kWidth / 2) + lanes.lane() * (kValues / 2), codes);
      if (lanes.lane() == 0) p.norms[block] = norm;
    }
  }
}

}  // namespace

Status tbq4_quantize(const Tbq4QuantizeParams& params, const Launch& launch) {
  if (const Status status = enter(launch); !status.ok()) return status;
  if (params.x.rows == 0) return {};
  Tbq4QuantizeParams p = params;
  p.x = merge_dimensions(params.x);
  const auto stream = static_cast<cudaStream_t>(launch.stream);
  with_dtype(p.x.dtype, [&](auto t) {
    using T = decltype(t);
    const bool vector = address_bits(p.x, sizeof(typename T::Storage)) % kVectorBytes == 0;
    with_width(p.x.head_dim, vector, [&](auto width, auto aligned) {
      constexpr int kBlocks = kThreads / BlockLanes<width.value>::kLanes;
      const int64_t blocks = p.x.rows * (p.x.head_dim / width.value);
      const auto grid = static_cast<unsigned>(min_of<int64_t>(ceil_div(blocks, kBlocks), INT32_MAX));
      quantize_kernel<T, width.value, aligned.value != 0><<<grid, kThreads, 0, stream>>>(p);
    });
  });
  return launch_status();
}

}  // namespace flashq::cuda
