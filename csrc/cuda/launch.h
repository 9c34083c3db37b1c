// Around every kernel launch: the GPU has to be one that flashq has code for, and a failed launch becomes a Status.
#pragma once
#include "backend.h"

namespace flashq::cuda {

inline constexpr int kMinMajor = 8, kMinMinor = 0;  // compute capability: cp.async and bf16 arithmetic

// Refuses a GPU older than that; no driver is asked.
[[nodiscard]] Status check_capability(int major, int minor);

// What tests set to run, on any GPU, the kernels of smaller ones. 0: not set.
struct Overrides {
  int arch = 0;              // FLASHQ_CUDA_ARCH
  int64_t shared_bytes = 0;  // FLASHQ_CUDA_SMEM
};
// From the texts of the two variables, null where one is not set. No driver is asked.
[[nodiscard]] Status parse_overrides(const char* arch, const char* shared_bytes, Overrides& overrides);

// What a kernel's configuration is chosen by; the overrides have lowered it.
struct Device {
  int arch;              // major * 10 + minor of the compute capability
  int64_t shared_bytes;  // that a block can opt in to
  int sm_count;          // multiprocessors
};
// Asks the driver until it has answered once for a device.
[[nodiscard]] Status describe_device(int32_t device, Device& description);

// Makes the launch's device the current one of this library's CUDA runtime (torch has its own copy), and checks it.
[[nodiscard]] Status enter(const Launch& launch);
[[nodiscard]] Status enter(const Launch& launch, Device& device);

// Call right after a launch. It does not wait for the kernel.
[[nodiscard]] Status launch_status();

// "argument: expected ..., got ..."
[[nodiscard]] Status refuse(const char* argument, const char* expected, int64_t got);
inline constexpr char kMoreShared[] = "more bytes of shared memory a block for this head dim";

}  // namespace flashq::cuda
