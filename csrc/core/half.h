// fp16 and bf16 as bit patterns, to fp32 (exact) and back (nearest even, subnormals kept, NaN quiet).
//
// On the CPU integer arithmetic and selects: loops over these vectorise at every instruction set, give the same bits at
// each (hardware conversions differ in the payload of a NaN) and do not depend on the thread's flush mode.
#pragma once
#include "core/ieee.h"

namespace flashq {

// a where `take` holds, else b, without a branch: of `?:` the compiler makes one, and then vectorises nothing.
FLASHQ_HD int32_t select(bool take, int32_t a, int32_t b) { return b ^ ((a ^ b) & -static_cast<int32_t>(take)); }

FLASHQ_HD float half_to_float(uint16_t h) {
#if defined(__CUDA_ARCH__)
  float x;
  asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(h));
  return x;
#else
  const int32_t sign = (h & 0x8000) << 16;
  const int32_t shifted = (h & 0x7fff) << 13;                            // exponent and mantissa in fp32's places
  const int32_t rebias = shifted >= 0x0f800000 ? 224 << 23 : 112 << 23;  // Inf and NaN go to fp32's top exponent
  // A subnormal: its integer value on top of 2^-14's mantissa, less 2^-14. No fp32 subnormal is involved.
  const float tiny = ieee::sub(float_of(static_cast<uint32_t>(shifted + (113 << 23))), 0x1p-14f);
  const int32_t magnitude = select(shifted < 0x00800000, static_cast<int32_t>(bits_of(tiny)), shifted + rebias);
  return float_of(static_cast<uint32_t>(magnitude | sign));
#endif
}

FLASHQ_HD uint16_t float_to_half(float x) {
#if defined(__CUDA_ARCH__)
  uint16_t h;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(h) : "f"(x));
  return h;
#else
  const int32_t bits = static_cast<int32_t>(bits_of(x)), magnitude = bits & 0x7fffffff;
  const int32_t sign = (bits >> 16) & 0x8000;
  // Below 2^-14 the grid of fp16 has steps of 2^-24, the steps of fp32 from 0.5 on: the sum rounds as fp16 does.
  const float on_grid = ieee::add(float_of(static_cast<uint32_t>(magnitude)), 0.5f);
  const int32_t subnormal = static_cast<int32_t>(bits_of(on_grid)) - 0x3f000000;
  const int32_t rounded = (magnitude - (112 << 23) + 0xfff + ((magnitude >> 13) & 1)) >> 13;
  int32_t h = select(magnitude < 0x38800000, subnormal, rounded);
  h = select(magnitude >= 0x477ff000, 0x7c00, h);  // 65520 and above
  h = select(magnitude > 0x7f800000, 0x7e00, h);
  return static_cast<uint16_t>(h | sign);
#endif
}

FLASHQ_HD float bfloat_to_float(uint16_t h) { return float_of(static_cast<uint32_t>(h) << 16); }

FLASHQ_HD uint16_t float_to_bfloat(float x) {
#if defined(__CUDA_ARCH__)
  uint16_t h;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(h) : "f"(x));
  return h;
#else
  const uint32_t bits = bits_of(x);
  const bool nan = static_cast<int32_t>(bits & 0x7fffffff) > 0x7f800000;
  return static_cast<uint16_t>((nan ? bits | 0x400000 : bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
#endif
}

// Storage types of the three dtypes, for templates: load widens, store rounds.
struct Float32 {
  using Storage = float;
  static FLASHQ_HD float load(float x) { return x; }
  static FLASHQ_HD float store(float x) { return x; }
};
struct Float16 {
  using Storage = uint16_t;
  static FLASHQ_HD float load(uint16_t x) { return half_to_float(x); }
  static FLASHQ_HD uint16_t store(float x) { return float_to_half(x); }
};
struct Bfloat16 {
  using Storage = uint16_t;
  static FLASHQ_HD float load(uint16_t x) { return bfloat_to_float(x); }
  static FLASHQ_HD uint16_t store(float x) { return float_to_bfloat(x); }
};

}  // namespace flashq
