#include <cuda_runtime_api.h>

#include <atomic>
#include <charconv>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <mutex>

#include "cuda/launch.h"

namespace flashq::cuda {
namespace {

// The error is reported here, so that a later launch that succeeds does not find it.
Status failure(const char* expected, cudaError_t error) {
  (void)cudaGetLastError();
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

// What is known of a device. Filled once, so that a launch costs no queries; a query that failed is made again.
struct Slot {
  std::mutex mutex;
  std::atomic<bool> described = false;
  Device device;
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

struct Slots {
  explicit Slots(int devices) : count(devices), slots(std::make_unique<Slot[]>(static_cast<size_t>(devices))) {}

  int count;
  std::unique_ptr<Slot[]> slots;
};

// The slot of a device.
Status find_slot(int32_t device, Slot*& slot) {
  static std::atomic<Slots*> known = nullptr;  // never freed: other threads may launch until the process ends
  Slots* all = known.load(std::memory_order_acquire);
  if (!all) {
    int count = 0;
    if (const cudaError_t error = cudaGetDeviceCount(&count)) return failure("a usable GPU", error);
    auto made = std::make_unique<Slots>(count);
    if (known.compare_exchange_strong(all, made.get(), std::memory_order_acq_rel)) all = made.release();
  }
  if (device < 0 || device >= all->count) return failure("a usable GPU", cudaErrorInvalidDevice);
  slot = &all->slots[static_cast<size_t>(device)];
  return {};
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
  Slot* slot = nullptr;
  if (const Status status = find_slot(device, slot); !status.ok()) return status;
  if (!slot->described.load(std::memory_order_acquire)) {
    const std::scoped_lock lock(slot->mutex);
    if (!slot->described.load(std::memory_order_relaxed)) {
      if (const Status status = query(device, slot->device); !status.ok()) return status;
      slot->described.store(true, std::memory_order_release);
    }
  }
  description = slot->device;
  return {};
}

Status enter(const Launch& launch, Device& device) {
  if (const cudaError_t error = cudaSetDevice(launch.device)) return failure("a usable GPU", error);
  return describe_device(launch.device, device);
}

Status enter(const Launch& launch) {
  Device device;
  return enter(launch, device);
}

Status refuse(const char* argument, const char* expected, int64_t got) {
  Status status;
  std::snprintf(status.message, sizeof status.message, "%s: expected %s, got %lld", argument, expected,
                static_cast<long long>(got));
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
