// The kernels of one head dim.
#pragma once
#include "cuda/opt_in.h"
#include "cuda/tbq4_attention/kernel.cuh"
#include "cuda/tbq4_attention/launch.h"

namespace flashq::cuda {

template <int D, int kTiles>
Status launch_code_kernel(const CodeLaunch& how, const CodeParams& p, const Launch& launch) {
  constexpr auto kKernel = code_attention_kernel<D, kTiles, most_code_warps(D, kTiles)>;
  Device device{};
  if (const Status status = describe_device(launch.device, device); !status.ok()) return status;
  opt_in<kKernel>(launch.device, static_cast<int>(device.shared_bytes));  // launch_status() reports a failure
  kKernel<<<static_cast<unsigned>(how.ctas), static_cast<unsigned>(how.warps * 32),
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
