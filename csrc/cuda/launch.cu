#include <cuda_runtime_api.h>

#include <charconv>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <vector>

#include "cuda/launch.h"

namespace flashq::cuda {
namespace {

Status failure(const char* expected, cudaError_t error) {
  Status status;
  std::snprintf(status.message, sizeof status.message, "device: expected %s, got %s (%s)", expected,
                cudaGetErrorName(error), cudaGetErrorString(error));
  return status;
}

Status refuse_override(const char* variable, const char* expected, const char* got) {
  Status status;
  std::snprintf(status.message, sizeof status.message, "%s: expected %s, got %.100s", variable, expected, got);
  return status;
}

// What is known of a device. Filled once, so that a launch costs no queries.
struct Slot {
  std::once_flag described;
  Device device;
  Status problem;
};

Status query(int32_t device, Device& description) {
  Overrides overrides;
  Status status = parse_overrides(std::getenv("FLASHQ_CUDA_ARCH"), std::getenv("FLASHQ_CUDA_SMEM"), overrides);
  if (!status.ok()) return status;
  int major = 0, minor = 0, shared_bytes = 0;
  cudaError_t error = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
  if (!error) error = cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device);
  if (!error) error = cudaDeviceGetAttribute(&description.sm_count, cudaDevAttrMultiProcessorCount, device);
  if (!error) error = cudaDeviceGetAttribute(&shared_bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
  if (error) return failure("a usable GPU", error);
  description.arch = overrides.arch ? overrides.arch : major * 10 + minor;
  description.shared_bytes = shared_bytes;
  if (overrides.shared_bytes) description.shared_bytes = min_of(description.shared_bytes, overrides.shared_bytes);
  return check_capability(major, minor);
}

// The slot of a device, described; null: there is no such device.
Slot* find_slot(int32_t device) {
  static std::vector<Slot> slots = [] {
    int count = 0;
    if (cudaGetDeviceCount(&count)) count = 0;
    return std::vector<Slot>(static_cast<size_t>(count));
  }();
  const auto index = static_cast<size_t>(device);
  if (device < 0 || index >= slots.size()) return nullptr;
  Slot& slot = slots[index];
  std::call_once(slot.described, [&] { slot.problem = query(device, slot.device); });
  return &slot;
}

}  // namespace

Status check_capability(int major, int minor) {
  Status status;
  if (major * 10 + minor < kMinMajor * 10 + kMinMinor)
    std::snprintf(status.message, sizeof status.message,
                  "device: expected an NVIDIA GPU of compute capability %d.%d or newer, got %d.%d", kMinMajor,
                  kMinMinor, major, minor);
  return status;
}

Status parse_overrides(const char* arch, const char* shared_bytes, Overrides& overrides) {
  if (arch && *arch) {
    if (std::strcmp(arch, "80") != 0) return refuse_override("FLASHQ_CUDA_ARCH", "80 or nothing", arch);
    overrides.arch = 80;
  }
  if (shared_bytes && *shared_bytes) {
    const char* end = shared_bytes + std::strlen(shared_bytes);
    const auto [rest, error] = std::from_chars(shared_bytes, end, overrides.shared_bytes);
    if (error != std::errc() || rest != end || overrides.shared_bytes < 1)
      return refuse_override("FLASHQ_CUDA_SMEM", "a number of bytes from 1 on, or nothing", shared_bytes);
  }
  return {};
}

Status describe_device(int32_t device, Device& description) {
  const Slot* slot = find_slot(device);
  if (!slot) return failure("a usable GPU", cudaErrorInvalidDevice);
  description = slot->device;
  return slot->problem;
}

Status enter(const Launch& launch, Device& device) {
  if (const cudaError_t error = cudaSetDevice(launch.device)) return failure("a usable GPU", error);
  return describe_device(launch.device, device);
}

Status enter(const Launch& launch) {
  Device device;
  return enter(launch, device);
}

Status launch_status() {
  const cudaError_t error = cudaGetLastError();
  if (error == cudaErrorNoKernelImageForDevice || error == cudaErrorUnsupportedPtxVersion)
    return failure("a GPU and a driver for the architectures of this build, " FLASHQ_CUDA_ARCHS, error);
  if (error) return failure("a kernel launch", error);
  return {};
}

}  // namespace flashq::cuda
