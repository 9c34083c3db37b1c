// Tensor maps for TMA, encoded on the host by the driver.
#pragma once
#include <cuda.h>
#include <cudaTypedefs.h>
#include <cuda_runtime_api.h>

#include <cstdint>
#include <cstdio>

#include "backend.h"

namespace flashq::cuda {

// A tensor of 16-bit elements, columns first; the strides (in elements) of the other four dimensions.
struct TensorShape {
  const void* data;
  bool bfloat16;
  uint64_t size[5];
  int64_t stride[4];
  uint32_t box[5];  // 64 columns first
};

// Sizes are positive, strides and the base are multiples of 16 bytes. False where the driver refuses.
[[nodiscard]] inline bool encode_tensor_map(const TensorShape& shape, CUtensorMap& map) {
  static const auto encode = [] {
    void* found = nullptr;
    cudaDriverEntryPointQueryResult result;
#if CUDART_VERSION >= 12050
    const cudaError_t error =
        cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found, 12000, cudaEnableDefault, &result);
#else
    const cudaError_t error = cudaGetDriverEntryPoint("cuTensorMapEncodeTiled", &found, cudaEnableDefault, &result);
#endif
    const bool usable = !error && result == cudaDriverEntryPointSuccess;
    return usable ? reinterpret_cast<PFN_cuTensorMapEncodeTiled_v12000>(found) : nullptr;
  }();
  if (!encode) return false;
  cuuint64_t size[5], strides[4];
  for (int i = 0; i < 5; ++i) size[i] = shape.size[i];
  for (int i = 0; i < 4; ++i) strides[i] = static_cast<cuuint64_t>(shape.stride[i]) * 2;
  const cuuint32_t steps[5] = {1, 1, 1, 1, 1};
  return encode(&map, shape.bfloat16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16, 5,
                const_cast<void*>(shape.data), size, strides, shape.box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
                CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

[[nodiscard]] inline Status refuse_tensor_map() {
  Status status;
  std::snprintf(status.message, sizeof status.message,
                "device: expected a driver that encodes tensor maps (CUDA 12 or newer), got a refusal");
  return status;
}

}  // namespace flashq::cuda
