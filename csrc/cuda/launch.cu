#include <cuda_runtime_api.h>

#include <atomic>
#include <cstdio>

#include "cuda/launch.h"

namespace flashq::cuda {
namespace {

Status failure(const char* expected, cudaError_t error) {
  Status status;
  std::snprintf(status.message, sizeof status.message, "device: expected %s, got %s (%s)", expected,
                cudaGetErrorName(error), cudaGetErrorString(error));
  return status;
}

// Devices that passed, so that a launch costs no attribute queries. A device beyond the last slot is asked every time.
constexpr int kRemembered = 64;
std::atomic<bool> passed[kRemembered];

}  // namespace

Status check_capability(int major, int minor) {
  Status status;
  if (major * 10 + minor < kMinMajor * 10 + kMinMinor)
    std::snprintf(status.message, sizeof status.message,
                  "device: expected an NVIDIA GPU of compute capability %d.%d or newer, got %d.%d", kMinMajor,
                  kMinMinor, major, minor);
  return status;
}

Status enter(const Launch& launch) {
  if (const cudaError_t error = cudaSetDevice(launch.device)) return failure("a usable GPU", error);
  const bool remembered = launch.device < kRemembered;
  if (remembered && passed[launch.device].load(std::memory_order_relaxed)) return {};
  int major = 0, minor = 0;
  cudaError_t error = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, launch.device);
  if (!error) error = cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, launch.device);
  if (error) return failure("a usable GPU", error);
  const Status status = check_capability(major, minor);
  if (status.ok() && remembered) passed[launch.device].store(true, std::memory_order_relaxed);
  return status;
}

Status launch_status() {
  const cudaError_t error = cudaGetLastError();
  if (error == cudaErrorNoKernelImageForDevice || error == cudaErrorUnsupportedPtxVersion)
    return failure("a GPU and a driver for the architectures of this build, " FLASHQ_CUDA_ARCHS, error);
  if (error) return failure("a kernel launch", error);
  return {};
}

}  // namespace flashq::cuda
