// Barriers in shared memory that threads and TMA copies arrive at (sm_90).
#pragma once
#include <cuda/ptx>

#include "core/portability.h"

namespace flashq::cuda::ptx {

// A phase ends when all expected arrivals and all announced bytes are there; then the next begins. `parity` is that of
// the phase waited for: 0 for the first, 1 for the second, 0 for the third.
struct Barrier {
  uint64_t state;

  __device__ __forceinline__ void init(uint32_t arrivals) { ::cuda::ptx::mbarrier_init(&state, arrivals); }
  __device__ __forceinline__ void arrive() { ::cuda::ptx::mbarrier_arrive(&state); }
  // One arrival, which also announces the bytes that copies will bring.
  __device__ __forceinline__ void arrive_expecting(uint32_t bytes) {
    using namespace ::cuda::ptx;
    mbarrier_arrive_expect_tx(sem_release, scope_cta, space_shared, &state, bytes);
  }
  __device__ __forceinline__ void wait(uint32_t parity) {
    while (!::cuda::ptx::mbarrier_try_wait_parity(&state, parity)) {
    }
  }
};

// After init, before other threads or TMA see a barrier.
__device__ __forceinline__ void publish_barriers() {
  ::cuda::ptx::fence_mbarrier_init(::cuda::ptx::sem_release, ::cuda::ptx::scope_cluster);
}

// A position in a ring of kSize buffers.
template <int kSize> struct Ring {
  int at = 0;
  uint32_t parity = 0;

  __device__ __forceinline__ void advance() {
    if (++at == kSize) {
      at = 0;
      parity ^= 1;
    }
  }
};

}  // namespace flashq::cuda::ptx
