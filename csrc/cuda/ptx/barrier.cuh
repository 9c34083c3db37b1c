// Barriers of some of a block's warps.
#pragma once
#include "core/portability.h"

namespace flashq::cuda::ptx {

// Waits until `threads` threads, whole warps, have come to barrier `id` (1 to 15; 0 is __syncthreads).
__device__ __forceinline__ void named_barrier_sync(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
// Comes to the barrier without waiting.
__device__ __forceinline__ void named_barrier_arrive(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

}  // namespace flashq::cuda::ptx
