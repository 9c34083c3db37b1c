// Launches by programmatic dependent launch (ptx/dependent_launch.cuh).
#pragma once
#include <cuda_runtime_api.h>

namespace flashq::cuda {

// The kernel may start before the one ahead of it in the stream has ended, as far as that one allows and the GPU has
// room; it has to call ptx::wait_for_primary before it touches global memory. launch_status() reports a failure.
template <class... Parameters> void launch_overlapped(void (*kernel)(Parameters...), dim3 grid, dim3 block,
                                                      size_t shared_bytes, cudaStream_t stream,
                                                      const Parameters&... parameters) {
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = block;
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = 1;
  cudaLaunchKernelEx(&config, kernel, parameters...);
}

}  // namespace flashq::cuda
