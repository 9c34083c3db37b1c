// Copies from global memory that run on while the thread goes on, to shared memory or the L2.
#pragma once
#include "core/portability.h"

namespace flashq::cuda::ptx {

// 16 bytes, both addresses aligned to 16, past L1. Where `wanted` is false nothing is read, whatever `from` is, and
// zeros are written.
__device__ __forceinline__ void cp_async_16(uint32_t to, const void* from, bool wanted) {
  const int bytes = wanted ? 16 : 0;
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(__cvta_generic_to_global(from)),
               "r"(bytes)
               : "memory");
}

// The same, but where `wanted` is false nothing is written either.
__device__ __forceinline__ void cp_async_16_if(bool wanted, uint32_t to, const void* from) {
  asm volatile(
      "{\n.reg .pred wanted;\nsetp.ne.b32 wanted, %2, 0;\n"
      "@wanted cp.async.cg.shared.global.L2::128B [%0], [%1], 16;\n}" ::"r"(to),
      "l"(__cvta_generic_to_global(from)), "r"(static_cast<int>(wanted))
      : "memory");
}

// 8 or 4 bytes, both addresses aligned to as many.
__device__ __forceinline__ void cp_async_8(void* to, const void* from) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 8;" ::"r"(static_cast<uint32_t>(__cvta_generic_to_shared(to))),
               "l"(__cvta_generic_to_global(from))
               : "memory");
}
__device__ __forceinline__ void cp_async_4(void* to, const void* from) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(static_cast<uint32_t>(__cvta_generic_to_shared(to))),
               "l"(__cvta_generic_to_global(from))
               : "memory");
}

__device__ __forceinline__ void prefetch_l2(const void* from) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(__cvta_generic_to_global(from)));
}

// Ends this thread's current group of copies, which may be empty.
__device__ __forceinline__ void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until at most kPending of this thread's newest groups are still on their way.
template <int kPending> __device__ __forceinline__ void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

}  // namespace flashq::cuda::ptx
