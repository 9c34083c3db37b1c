// Warpgroups that have parts of their own in one kernel: registers handed from one to the other.
#pragma once
#include "core/portability.h"

namespace flashq::cuda::ptx {

template <int kRegisters> __device__ __forceinline__ void give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters> __device__ __forceinline__ void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

}  // namespace flashq::cuda::ptx
