// Around every kernel launch: the GPU has to be one that flashq has code for, and a failed launch becomes a Status.
#pragma once
#include "backend.h"

namespace flashq::cuda {

inline constexpr int kMinMajor = 8, kMinMinor = 0;  // compute capability: cp.async and bf16 arithmetic

// Refuses a GPU older than that; no driver is asked.
[[nodiscard]] Status check_capability(int major, int minor);

// Makes the launch's device the current one of this library's CUDA runtime (torch has its own copy), and checks it.
[[nodiscard]] Status enter(const Launch& launch);

// Call right after a launch. It does not wait for the kernel.
[[nodiscard]] Status launch_status();

}  // namespace flashq::cuda
