// Programmatic dependent launch (compute capability 9.0 and newer; nothing before): a kernel starts while the one
// before it in the stream still runs.
#pragma once
#include "core/portability.h"

namespace flashq::cuda::ptx {

// The next kernel may start now, as far as there is room.
__device__ __forceinline__ void allow_dependents() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
// Waits until the kernel before this one has ended and its writes can be read.
__device__ __forceinline__ void wait_for_primary() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

}  // namespace flashq::cuda::ptx
