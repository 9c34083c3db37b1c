// Copies of boxes of a tensor between global and shared memory by the TMA unit (sm_90). One thread issues them.
//
// A box is 64 columns (128 bytes) wide and lies in shared memory in the 128-byte swizzle: chunk c (16 bytes) of row r
// stands at chunk c ^ (r % 8). What lies outside the tensor arrives as zeros, counts as bytes and is never written.
#pragma once
#include <cuda.h>

#include "cuda/ptx/mbarrier.cuh"

namespace flashq::cuda::ptx {

inline constexpr int kTensorRank = 5;

__device__ __forceinline__ void tma_load(void* to, const CUtensorMap& map, const int32_t (&at)[kTensorRank],
                                         Barrier& arrived) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%2, %3, %4, %5, %6}], [%7];" ::"r"(shared_address(to)),
      "l"(&map), "r"(at[0]), "r"(at[1]), "r"(at[2]), "r"(at[3]), "r"(at[4]), "r"(arrived.address())
      : "memory");
}
// Neighbouring bytes, a multiple of 16 at addresses aligned to 16.
__device__ __forceinline__ void bulk_load(void* to, const void* from, uint32_t bytes, Barrier& arrived) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                   shared_address(to)),
               "l"(__cvta_generic_to_global(from)), "r"(bytes), "r"(arrived.address())
               : "memory");
}
__device__ __forceinline__ void tma_store(const CUtensorMap& map, const int32_t (&at)[kTensorRank], const void* from) {
  asm volatile("cp.async.bulk.tensor.5d.global.shared::cta.tile.bulk_group [%0, {%1, %2, %3, %4, %5}], [%6];" ::"l"(
                   &map),
               "r"(at[0]), "r"(at[1]), "r"(at[2]), "r"(at[3]), "r"(at[4]), "r"(shared_address(from))
               : "memory");
}
__device__ __forceinline__ void tma_store_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
// Waits until the shared memory of this thread's stores has been read.
__device__ __forceinline__ void tma_store_wait_read() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }
__device__ __forceinline__ void prefetch_tensor_map(const CUtensorMap& map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

// Makes this thread's ordinary writes to shared memory visible to TMA and wgmma.
__device__ __forceinline__ void fence_async_proxy() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

}  // namespace flashq::cuda::ptx
