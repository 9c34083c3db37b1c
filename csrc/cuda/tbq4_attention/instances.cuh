// The kernels of one head dim.
#pragma once
#include <atomic>

#include "cuda/tbq4_attention/kernel.cuh"
#include "cuda/tbq4_attention/launch.h"

namespace flashq::cuda {

template <int D, int kTiles>
Status launch_code_kernel(const CodeLaunch& how, const CodeParams& p, const Launch& launch) {
  const auto kernel = code_attention_kernel<D, kTiles, most_code_warps(D, kTiles)>;
  // Devices on which the kernel may use their shared memory, so that a launch costs one call.
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

template <int D> Status launch_code_attention(const CodeLaunch& how, const CodeParams& p, const Launch& launch) {
  if constexpr (most_code_tiles(D) == 2) {
    if (how.tiles == 2) return launch_code_kernel<D, 2>(how, p, launch);
  }
  return launch_code_kernel<D, 1>(how, p, launch);
}

}  // namespace flashq::cuda
