// Barriers in shared memory that threads and TMA copies arrive at (sm_90). In PTX, because <cuda/ptx> takes the
// compiler 2.5 s in every file.
#pragma once
#include "core/portability.h"
#include "cuda/ptx/ldmatrix.cuh"

namespace flashq::cuda::ptx {

// A phase ends when all expected arrivals and all announced bytes are there; then the next begins. `parity` is that of
// the phase waited for: 0 for the first, 1 for the second, 0 for the third.
struct Barrier {
  uint64_t state;

  __device__ __forceinline__ void init(uint32_t arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(address()), "r"(arrivals) : "memory");
  }
  __device__ __forceinline__ void arrive() {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(address()) : "memory");
  }
  __device__ __forceinline__ void arrive_for(uint32_t threads) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0], %1;" ::"r"(address()), "r"(threads) : "memory");
  }
  // One arrival of a whole warp, by a lane that the hardware chooses: faster than to ask for the lane's number.
  __device__ __forceinline__ void arrive_once() {
    asm volatile(
        "{\n.reg .pred p;\nelect.sync _|p, 0xffffffff;\n@p mbarrier.arrive.shared::cta.b64 _, [%0];\n}" ::"r"(address())
        : "memory");
  }
  // One arrival, which also announces the bytes that copies will bring.
  __device__ __forceinline__ void arrive_expecting(uint32_t bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(address()), "r"(bytes) : "memory");
  }
  __device__ __forceinline__ void wait(uint32_t parity) {
    uint32_t done;
    do {
      asm volatile("{\n.reg .pred p;\nmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\nselp.b32 %0, 1, 0, p;\n}"
                   : "=r"(done)
                   : "r"(address()), "r"(parity)
                   : "memory");
    } while (!done);
  }
  __device__ __forceinline__ uint32_t address() { return shared_address(&state); }
};

// After init, before other threads or TMA see a barrier.
__device__ __forceinline__ void publish_barriers() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
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
