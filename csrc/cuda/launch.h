// Around every kernel launch: the GPU has to be one that flashq has code for, a failed launch becomes a Status, and
// what an earlier kernel found wrong is raised.
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
// Asks the driver once a device and process.
[[nodiscard]] Status describe_device(int32_t device, Device& description);

// A value out of range that a kernel met under FLASHQ_CHECK=1. One a device, in pinned host memory: kernels write it
// where it stands, and nothing has to be copied back.
struct Finding {
  enum State : int32_t { kNone, kBeingWritten, kComplete };
  enum Value : int32_t { kKvAppendSlot, kTbq4AppendSlot };

  int32_t state;  // State
  Value what;
  int64_t index, got, limit;  // which element of the index tensor, its value, what that has to be below
};

// Makes the launch's device the current one of this library's CUDA runtime (torch has its own copy), and checks it.
// With Launch::check it waits for the stream and returns what kernels found wrong since, unless the stream captures.
[[nodiscard]] Status enter(const Launch& launch);
[[nodiscard]] Status enter(const Launch& launch, Device& device);

// Where a kernel reports to, on the device of the launch; null without Launch::check. Call after enter().
[[nodiscard]] Finding* finding_of(const Launch& launch);

// Call right after a launch. It does not wait for the kernel.
[[nodiscard]] Status launch_status();

}  // namespace flashq::cuda
