// The thread's number, read anew: what is worked out from it, the compiler keeps in no register of a loop that has none
// left.
#pragma once
#include "core/portability.h"

namespace flashq::cuda::ptx {

__device__ __forceinline__ int fresh_thread() {  // threadIdx.x
  int thread;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
  return thread;
}
__device__ __forceinline__ int fresh_lane() { return fresh_thread() & 31; }

}  // namespace flashq::cuda::ptx
