// All decode kernels of one dtype.
#pragma once
#include "cuda/count_clusters.h"
#include "cuda/decode/kernel.cuh"
#include "cuda/decode/launch.h"
#include "cuda/decode/merge_partials.h"
#include "cuda/opt_in.h"

namespace flashq::cuda {

template <class T, int kDim, int kTiles, int kDepth, bool kCluster>
Status launch_decode_kernel(const DecodeLaunch& how, DecodeParams p, const Launch& launch) {
  constexpr auto kKernel = decode_kernel<T, kDim, kTiles, kDepth, kCluster>;
  Device device{};
  if (const Status status = describe_device(launch.device, device); !status.ok()) return status;
  opt_in<kKernel>(launch.device, static_cast<int>(device.shared_bytes));  // launch_status() reports a failure
  // It starts while the kernel before it ends; clusters, which need room at one place, do so 1 us later than without.
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  if (how.cluster > 1) {
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim = {static_cast<unsigned>(how.cluster), 1, 1};
  }
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(how.ctas));
  config.blockDim = dim3(static_cast<unsigned>(how.warps * 32));
  config.dynamicSmemBytes = static_cast<size_t>(how.shared_bytes);
  config.stream = static_cast<cudaStream_t>(launch.stream);
  config.attrs = &attribute;
  config.numAttrs = runs_code_of_90(launch.device) ? 1 : 0;
  halve_clusters<kKernel, kDecodeShapes>(config, attribute, p, launch.device, how.shape);
  cudaLaunchKernelEx(&config, kKernel, p);
  return launch_status();
}

template <class T, int kDim, int kTiles, int kDepth>
Status launch_decode_shape(const DecodeLaunch& how, const DecodeParams& p, const Launch& launch) {
  return how.cluster > 0 ? launch_decode_kernel<T, kDim, kTiles, kDepth, true>(how, p, launch)
                         : launch_decode_kernel<T, kDim, kTiles, kDepth, false>(how, p, launch);
}

template <class T> Status launch_decode(const DecodeLaunch& how, const DecodeParams& p, const Launch& launch) {
  using Kernel = Status (*)(const DecodeLaunch&, const DecodeParams&, const Launch&);
  // Teams of several warps compute two groups of tokens at a time, where registers allow it.
  static constexpr Kernel kKernels[][3] = {
      {launch_decode_shape<T, 64, 1, 1>, launch_decode_shape<T, 64, 2, 1>, launch_decode_shape<T, 64, 2, 2>},
      {launch_decode_shape<T, 128, 1, 1>, launch_decode_shape<T, 128, 2, 1>, launch_decode_shape<T, 128, 2, 2>},
      {launch_decode_shape<T, 256, 1, 1>, launch_decode_shape<T, 256, 2, 1>, launch_decode_shape<T, 256, 2, 1>}};
  if (how.wide) return launch_decode_kernel<T, 128, 2, 4, false>(how, p, launch);
  return kKernels[how.dim][min_of(how.shape, 2)](how, p, launch);
}

}  // namespace flashq::cuda
