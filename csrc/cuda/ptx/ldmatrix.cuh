// Tiles of 8 x 8 16-bit values between shared memory and the fragments of mma.cuh.
#pragma once
#include "core/portability.h"

namespace flashq::cuda::ptx {

// The 32-bit address of shared memory that PTX instructions take.
__device__ __forceinline__ uint32_t shared_address(const void* at) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(at));
}

// Four tiles, 8 rows of 16 bytes each: lane 8 i + j gives the address of row j of tile i. Lane 4 g + t receives values
// 2t and 2t + 1 of row g of tile i in to[i].
__device__ __forceinline__ void ldmatrix_x4(uint32_t (&to)[4], uint32_t row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(row)
               : "memory");
}
// The same, of the transposed tiles: values 2t and 2t + 1 of column g.
__device__ __forceinline__ void ldmatrix_x4_trans(uint32_t (&to)[4], uint32_t row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(row)
               : "memory");
}

// An 8 x 8 tile in registers, transposed: lane 4 g + t holds values 2t and 2t + 1 of row g.
__device__ __forceinline__ uint32_t transpose_8x8(uint32_t x) {
  uint32_t y;
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
  return y;
}

// Four tiles of 8 x 8 16-bit values to shared memory, the counterpart of ldmatrix_x4: lane 8 i + j gives the address of
// row j of tile i.
__device__ __forceinline__ void stmatrix_x4(uint32_t row, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(row), "r"(a), "r"(b), "r"(c),
               "r"(d)
               : "memory");
}

}  // namespace flashq::cuda::ptx
