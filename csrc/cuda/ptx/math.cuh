// Functions of the special function unit.
#pragma once
#include "core/portability.h"

namespace flashq::cuda::ptx {

// 2^x, off by at most 2 units in the last place; results below 2^-126 are 0, NaN stays NaN.
__device__ __forceinline__ float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// The larger of two fp16 numbers, in both halves; of a number and a NaN the number.
__device__ __forceinline__ uint32_t max_halves(uint32_t a, uint32_t b) {
  uint32_t y;
  asm("max.f16x2 %0, %1, %2;" : "=r"(y) : "r"(a), "r"(b));
  return y;
}

// The one of three whose bits are the largest as int, or the smallest as unsigned. As floats for the compiler, which
// would else keep both kinds of registers and spill.
__device__ __forceinline__ float max_bits(float a, float b, float c) {
  float y;
  asm("{\n.reg .b32 a, b, c;\nmov.b32 a, %1;\nmov.b32 b, %2;\nmov.b32 c, %3;\nmax.s32 a, a, b;\nmax.s32 a, a, c;\n"
      "mov.b32 %0, a;\n}"
      : "=f"(y)
      : "f"(a), "f"(b), "f"(c));
  return y;
}
__device__ __forceinline__ float min_bits(float a, float b, float c) {
  float y;
  asm("{\n.reg .b32 a, b, c;\nmov.b32 a, %1;\nmov.b32 b, %2;\nmov.b32 c, %3;\nmin.u32 a, a, b;\nmin.u32 a, a, c;\n"
      "mov.b32 %0, a;\n}"
      : "=f"(y)
      : "f"(a), "f"(b), "f"(c));
  return y;
}

// Off by at most 2^-10.987 relative.
__device__ __forceinline__ float tanh_approx(float x) {
  float y;
  asm("tanh.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

}  // namespace flashq::cuda::ptx
