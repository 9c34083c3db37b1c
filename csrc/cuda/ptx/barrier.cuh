// Barriers of some of a block's warps.
#pragma once
#include "core/portability.h"

namespace flashq::cuda::ptx {

// Waits until `threads` threads, whole warps, have come to barrier `name` (1 to 15; 0 is __syncthreads).
__device__ __forceinline__ void sync_named(int name, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(name), "r"(threads) : "memory");
}

}  // namespace flashq::cuda::ptx
