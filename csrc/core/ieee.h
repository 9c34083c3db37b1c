// fp32 operations that round once, to nearest even, and never fuse: what a byte format needs on every device.
//
// The CPU build turns contraction off (-ffp-contract=off); nvcc contracts by default and has intrinsics that it leaves
// alone. Flushing of subnormals is the caller's: see cpu/float_environment.h, and build device code without -ftz.
#pragma once
#include "core/portability.h"

namespace flashq {

FLASHQ_HD uint32_t bits_of(float x) {
#if defined(__CUDA_ARCH__)
  return __float_as_uint(x);
#else
  return __builtin_bit_cast(uint32_t, x);
#endif
}
FLASHQ_HD float float_of(uint32_t bits) {
#if defined(__CUDA_ARCH__)
  return __uint_as_float(bits);
#else
  return __builtin_bit_cast(float, bits);
#endif
}

namespace ieee {

#if defined(__CUDA_ARCH__)
FLASHQ_HD float add(float a, float b) { return __fadd_rn(a, b); }
FLASHQ_HD float sub(float a, float b) { return __fsub_rn(a, b); }
FLASHQ_HD float mul(float a, float b) { return __fmul_rn(a, b); }
FLASHQ_HD float div(float a, float b) { return __fdiv_rn(a, b); }
FLASHQ_HD float sqrt(float a) { return __fsqrt_rn(a); }
#else
FLASHQ_HD float add(float a, float b) { return a + b; }
FLASHQ_HD float sub(float a, float b) { return a - b; }
FLASHQ_HD float mul(float a, float b) { return a * b; }
FLASHQ_HD float div(float a, float b) { return a / b; }
FLASHQ_HD float sqrt(float a) { return __builtin_sqrtf(a); }
#endif

}  // namespace ieee
}  // namespace flashq
