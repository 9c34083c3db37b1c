// Launches of kernels that may start while the one before them ends. Such a kernel touches global memory only after
// ptx::wait_for_primary().
#pragma once
#include <cuda_runtime_api.h>

#include <string_view>

#include "cuda/launch.h"

namespace flashq::cuda {

// Whether code for 9.0a runs, which has wgmma and waits for the kernel before it (code for an older GPU does not): the
// GPU has to be of 9.0, and its code in the build.
[[nodiscard]] inline bool runs_90a(const Device& device) {
  constexpr bool kBuilt = std::string_view(FLASHQ_CUDA_ARCHS).find("9.0a") != std::string_view::npos;
  return kBuilt && device.arch == 90;
}

template <class... Params> void launch_overlapping(void (*kernel)(Params...), dim3 grid, int threads, int shared_bytes,
                                                   const Device& device, const Launch& launch, Params... params) {
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = dim3(static_cast<unsigned>(threads));
  config.dynamicSmemBytes = static_cast<size_t>(shared_bytes);
  config.stream = static_cast<cudaStream_t>(launch.stream);
  config.attrs = &attribute;
  config.numAttrs = runs_90a(device) ? 1 : 0;
  (void)cudaLaunchKernelEx(&config, kernel, params...);  // launch_status() tells
}

}  // namespace flashq::cuda
