// Shared memory beyond what a kernel may have without asking.
#pragma once
#include <cuda_runtime_api.h>

#include <atomic>
#include <cstdint>

namespace flashq::cuda {

// Lets the kernel have more than 48 KiB of shared memory: once a kernel and device, always with the same size.
template <auto kKernel> bool opt_in(int32_t device, int shared_bytes) {
  constexpr int kRemembered = 64;
  static std::atomic<bool> done[kRemembered];
  if (device < kRemembered && done[device].load(std::memory_order_relaxed)) return true;
  const bool good =
      cudaFuncSetAttribute(kKernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes) == cudaSuccess;
  if (good && device < kRemembered) done[device].store(true, std::memory_order_relaxed);
  return good;
}

}  // namespace flashq::cuda
