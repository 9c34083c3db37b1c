// The kernels of one head dim.
#pragma once
#include "cuda/count_clusters.h"
#include "cuda/opt_in.h"
#include "cuda/overlapping_launch.h"
#include "cuda/tbq4_attention/kernel.cuh"
#include "cuda/tbq4_attention/launch.h"

namespace flashq::cuda {

template <int D, int kTiles> Status launch_code_kernel(const CodeLaunch& how, CodeParams p, const Launch& launch) {
  constexpr auto kKernel = code_attention_kernel<D, kTiles>;
  Device device{};
  if (const Status status = describe_device(launch.device, device); !status.ok()) return status;
  opt_in<kKernel>(launch.device, static_cast<int>(device.shared_bytes));  // launch_status() reports a failure
  cudaLaunchAttribute attributes[2]{};
  attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[0].val.programmaticStreamSerializationAllowed = 1;
  attributes[1].id = cudaLaunchAttributeClusterDimension;
  attributes[1].val.clusterDim = {static_cast<unsigned>(p.cluster_ctas), 1, 1};
  const bool overlap = runs_90a(device);
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(how.ctas));
  config.blockDim = dim3(static_cast<unsigned>(how.warps * 32));
  config.dynamicSmemBytes = static_cast<size_t>(how.shared_bytes);
  config.stream = static_cast<cudaStream_t>(launch.stream);
  config.attrs = attributes + 1;
  config.numAttrs = p.cluster_ctas > 1 ? 1 : 0;
  halve_clusters<kKernel>(config, attributes[1], p, launch.device);
  if (overlap) {
    config.attrs = attributes;
    ++config.numAttrs;
  }
  cudaLaunchKernelEx(&config, kKernel, p);
  return launch_status();
}

template <int D> Status launch_code_attention(const CodeLaunch& how, const CodeParams& p, const Launch& launch) {
  if constexpr (most_code_tiles(D) == 2) {
    if (how.tiles == 2) return launch_code_kernel<D, 2>(how, p, launch);
  }
  return launch_code_kernel<D, 1>(how, p, launch);
}

}  // namespace flashq::cuda
