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

// Off by at most 2^-10.987 relative.
__device__ __forceinline__ float tanh_approx(float x) {
  float y;
  asm("tanh.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

}  // namespace flashq::cuda::ptx
