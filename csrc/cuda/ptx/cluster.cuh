// Clusters of thread blocks (compute capability 9.0 and newer; before, every block is alone).
#pragma once
#include "core/portability.h"

namespace flashq::cuda::ptx {

// Waits for all threads of the cluster; what they wrote can be read afterwards.
__device__ __forceinline__ void sync_cluster() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
#else
  __syncthreads();
#endif
}

// 4 kCount neighbouring bytes at a place of this block's shared memory (shared_address()), from the cluster's block
// `rank`.
template <int kCount> __device__ __forceinline__ void load_from_block(float (&to)[kCount], uint32_t at, int rank) {
  static_assert(kCount == 2 || kCount == 4);
#if __CUDA_ARCH__ >= 900
  uint32_t there;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(at), "r"(rank));
  if constexpr (kCount == 2)
    asm volatile("ld.shared::cluster.v2.f32 {%0, %1}, [%2];" : "=f"(to[0]), "=f"(to[1]) : "r"(there) : "memory");
  else
    asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(to[0]), "=f"(to[1]), "=f"(to[2]), "=f"(to[3])
                 : "r"(there)
                 : "memory");
#else
  for (int i = 0; i < kCount; ++i) to[i] = 0;  // there are no clusters
#endif
}

}  // namespace flashq::cuda::ptx
