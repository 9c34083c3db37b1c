// tbq4_dequantize: codes and norms of any strides back to rows.
#include <cuda_runtime_api.h>

#include "cuda/kernels.h"
#include "cuda/launch.h"
#include "cuda/tbq4/lanes.cuh"
#include "cuda/tbq4/rows.cuh"

namespace flashq::cuda {
namespace {

constexpr int kThreads = 128;

template <class T, int kWidth, bool kVector> __global__ void __launch_bounds__(kThreads)
    dequantize_kernel(const __grid_constant__ Tbq4DequantizeParams p) {
  using Lanes = BlockLanes<kWidth>;
  constexpr int kValues = Lanes::kValues, kBlocks = kThreads / Lanes::kLanes;
  const Lanes lanes;
  const int row_blocks = static_cast<int>(p.codes.head_dim) / kWidth;  // 1 or 2
  const int64_t blocks = p.codes.rows * row_blocks;
  for (int64_t first = int64_t{blockIdx.x} * kBlocks; first < blocks; first += int64_t{gridDim.x} * kBlocks) {
    const int64_t block = first + static_cast<int>(threadIdx.x) / Lanes::kLanes;
    uint32_t codes = 0;
    uint16_t norm = 0;
    if (block < blocks) {
      const int64_t row = row_blocks == 1 ? block : block >> 1;
      const int part = row_blocks == 1 ? 0 : static_cast<int>(block & 1);
      codes = load_codes<kVector>(static_cast<const uint8_t*>(p.codes.data) + row_offset(p.codes, row) +
                                  part * (kWidth / 2) + lanes.lane() * (kValues / 2));
      norm = static_cast<const uint16_t*>(p.norms.data)[row_offset(p.norms, row) + part];
    }
    float x[kValues];
    lanes.decode(codes, norm, x);
    if (block < blocks)
      store_values<T, true>(x, static_cast<typename T::Storage*>(p.out) + block * kWidth + lanes.lane() * kValues);
  }
}

}  // namespace

Status tbq4_dequantize(const Tbq4DequantizeParams& params, const Launch& launch) {
  if (const Status status = enter(launch); !status.ok()) return status;
  if (params.codes.rows == 0) return {};
  Tbq4DequantizeParams p = params;
  p.codes = merge_dimensions(params.codes);
  p.norms = merge_dimensions(params.norms);
  const auto stream = static_cast<cudaStream_t>(launch.stream);
  const bool vector = address_bits(p.codes, 1) % sizeof(uint32_t) == 0;
  with_dtype(p.out_dtype, [&](auto t) {
    with_width(p.codes.head_dim, vector, [&](auto width, auto aligned) {
      constexpr int kBlocks = kThreads / BlockLanes<width.value>::kLanes;
      const int64_t blocks = p.codes.rows * (p.codes.head_dim / width.value);
      const auto grid = static_cast<unsigned>(min_of<int64_t>(ceil_div(blocks, kBlocks), INT32_MAX));
      dequantize_kernel<decltype(t), width.value, aligned.value != 0><<<grid, kThreads, 0, stream>>>(p);
    });
  });
  return launch_status();
}

}  // namespace flashq::cuda
