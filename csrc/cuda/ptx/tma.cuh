// Copies of boxes of a tensor between global and shared memory by the TMA unit (sm_90). One thread issues them.
//
// A box is 64 columns (128 bytes) wide and lies in shared memory in the 128-byte swizzle: chunk c (16 bytes) of row r
// stands at chunk c ^ (r % 8). What lies outside the tensor arrives as zeros, counts as bytes and is never written.
#pragma once
#include <cuda.h>

#include <cuda/ptx>

#include "cuda/ptx/mbarrier.cuh"

namespace flashq::cuda::ptx {

inline constexpr int kTensorRank = 5;

__device__ __forceinline__ void tma_load(void* to, const CUtensorMap& map, const int32_t (&at)[kTensorRank],
                                         Barrier& arrived) {
  using namespace ::cuda::ptx;
  cp_async_bulk_tensor(space_cluster, space_global, to, &map, at, &arrived.state);
}
__device__ __forceinline__ void tma_store(const CUtensorMap& map, const int32_t (&at)[kTensorRank], const void* from) {
  using namespace ::cuda::ptx;
  cp_async_bulk_tensor(space_global, space_shared, &map, at, from);
}
__device__ __forceinline__ void tma_store_commit() { ::cuda::ptx::cp_async_bulk_commit_group(); }
// Waits until the shared memory of this thread's stores has been read.
__device__ __forceinline__ void tma_store_wait_read() {
  ::cuda::ptx::cp_async_bulk_wait_group_read(::cuda::ptx::n32_t<0>{});
}
__device__ __forceinline__ void prefetch_tensor_map(const CUtensorMap& map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

// Makes this thread's ordinary writes to shared memory visible to TMA and wgmma.
__device__ __forceinline__ void fence_async_proxy() { ::cuda::ptx::fence_proxy_async(::cuda::ptx::space_shared); }

}  // namespace flashq::cuda::ptx
