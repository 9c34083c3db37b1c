// Clusters of thread blocks (compute capability 9.0 and newer; before, every block is alone): values sent to the shared
// memory of another block, and their arrival there; or a barrier, after which blocks read each other's.
#pragma once
#include "core/portability.h"
#include "cuda/ptx/ldmatrix.cuh"

namespace flashq::cuda::ptx {

// Of a block, in its shared memory. Sends go on when all blocks of the cluster have greeted each other; waiting for
// what was sent is cheaper than a barrier of the cluster, which first completes all writes of its threads.
//
// For kernels that are launched with clusters: in another one st.async is an illegal instruction, even to the block
// itself.
struct Inbox {
  uint64_t state;

  // By one thread, before the block greets others.
  __device__ __forceinline__ void open() {
#if __CUDA_ARCH__ >= 900
    asm volatile(
        "mbarrier.init.shared::cta.b64 [%0], 1;\nfence.mbarrier_init.release.cluster;" ::"r"(shared_address(&state))
        : "memory");
#endif
  }
  // By one thread: how much is sent.
  __device__ __forceinline__ void expect(int bytes) {
#if __CUDA_ARCH__ >= 900
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(&state)), "r"(bytes)
                 : "memory");
#else
    static_cast<void>(bytes);
#endif
  }
  // By all threads of the block: all of it is there.
  __device__ __forceinline__ void wait() {
#if __CUDA_ARCH__ >= 900
    uint32_t done = 0;
    while (!done)
      asm volatile(
          "{\n.reg .pred p;\nmbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], 0;\nselp.u32 %0, 1, 0, "
          "p;\n}"
          : "=r"(done)
          : "r"(shared_address(&state))
          : "memory");
#else
    __syncthreads();
#endif
  }
  // Sends values to `to`, a place of this block's shared memory, but in the cluster's block `rank`.
  __device__ __forceinline__ void send(int rank, float2* to, float2 x) {
#if __CUDA_ARCH__ >= 900
    asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [%0], {%1, %2}, [%3];" ::"r"(
                     in_block(to, rank)),
                 "f"(x.x), "f"(x.y), "r"(in_block(&state, rank))
                 : "memory");
#else
    *to = x;
#endif
  }
  __device__ __forceinline__ void send(int rank, float4* to, float4 x) {
#if __CUDA_ARCH__ >= 900
    asm volatile(
        "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(
            in_block(to, rank)),
        "f"(x.x), "f"(x.y), "f"(x.z), "f"(x.w), "r"(in_block(&state, rank))
        : "memory");
#else
    *to = x;
#endif
  }

 private:
#if __CUDA_ARCH__ >= 900
  static __device__ __forceinline__ uint32_t in_block(const void* place, int rank) {
    uint32_t there;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(shared_address(place)), "r"(rank));
    return there;
  }
#endif
};

// By all threads of a cluster: their block has started, and its inbox is open.
__device__ __forceinline__ void greet_cluster() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
#endif
}
// By all threads of a cluster, after greet_cluster: so have all other blocks.
__device__ __forceinline__ void await_cluster() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
}

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
