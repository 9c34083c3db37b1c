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

// Four tiles of 8 x 8 16-bit values to shared memory, the counterpart of ldmatrix_x4: lane 8 i + j gives the address of
// row j of tile i.
__device__ __forceinline__ void stmatrix_x4(uint32_t row, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(row), "r"(a), "r"(b), "r"(c),
               "r"(d)
               : "memory");
}

}  // namespace flashq::cuda::ptx
