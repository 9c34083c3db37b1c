// All decode kernels of one dtype.
#pragma once
#include <atomic>

#include "cuda/decode/kernel.cuh"
#include "cuda/decode/launch.h"

namespace flashq::cuda {

template <class T, int kDim, int kTiles>
Status launch_decode_kernel(const DecodeLaunch& how, const DecodeParams& p, const Launch& launch) {
  const auto kernel = decode_kernel<T, kDim, kTiles>;
  // Devices on which the kernel may use its shared memory, so that a launch costs one call. The most it ever asks for
  // is what its first launch there allows.
  static std::atomic<uint64_t> prepared{0};
  const uint64_t bit = launch.device < 64 ? uint64_t{1} << launch.device : 0;
  if (!(prepared.load(std::memory_order_relaxed) & bit)) {
    Device device{};
    if (const Status status = describe_device(launch.device, device); !status.ok()) return status;
    cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(device.shared_bytes));
    prepared.fetch_or(bit, std::memory_order_relaxed);
  }
  kernel<<<static_cast<unsigned>(how.ctas), static_cast<unsigned>(how.warps * 32),
           static_cast<size_t>(how.shared_bytes), static_cast<cudaStream_t>(launch.stream)>>>(p);
  return launch_status();
}

template <class T> Status launch_decode(const DecodeLaunch& how, const DecodeParams& p, const Launch& launch) {
  using Kernel = Status (*)(const DecodeLaunch&, const DecodeParams&, const Launch&);
  static constexpr Kernel kKernels[][2] = {{launch_decode_kernel<T, 64, 1>, launch_decode_kernel<T, 64, 2>},
                                           {launch_decode_kernel<T, 128, 1>, launch_decode_kernel<T, 128, 2>},
                                           {launch_decode_kernel<T, 256, 1>, launch_decode_kernel<T, 256, 2>}};
  return kKernels[how.dim][kDecodeTiles[how.shape] - 1](how, p, launch);
}

}  // namespace flashq::cuda
