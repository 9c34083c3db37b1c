// Tensor core products of 16-bit operands with fp32 accumulators (mma.sync, compute capability 8.0 and newer).
//
// Fragments of m16n8k16, lane = 4 g + t: A (16, 16) holds rows g and g + 8, columns 2t, 2t + 1 and 2t + 8, 2t + 9;
// B (16, 8) holds rows 2t, 2t + 1 and 2t + 8, 2t + 9 of column g; the accumulator (16, 8) holds rows g and g + 8 of
// columns 2t, 2t + 1. So two neighbouring accumulators, packed, are an A fragment of the next product.
#pragma once
#include "core/half.h"

namespace flashq::cuda::ptx {

template <class T> __device__ __forceinline__ void mma_16x8x16(float (&acc)[4], const uint32_t (&a)[4], uint32_t b0,
                                                               uint32_t b1);

template <> __device__ __forceinline__ void mma_16x8x16<Float16>(float (&acc)[4], const uint32_t (&a)[4], uint32_t b0,
                                                                 uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, "
      "%3};"
      : "+f"(acc[0]), "+f"(acc[1]), "+f"(acc[2]), "+f"(acc[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
template <> __device__ __forceinline__ void mma_16x8x16<Bfloat16>(float (&acc)[4], const uint32_t (&a)[4], uint32_t b0,
                                                                  uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, "
      "%2, %3};"
      : "+f"(acc[0]), "+f"(acc[1]), "+f"(acc[2]), "+f"(acc[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Two numbers rounded to T, the first in the low half.
template <class T> __device__ __forceinline__ uint32_t pack(float low, float high);

template <> __device__ __forceinline__ uint32_t pack<Float16>(float low, float high) {
  uint32_t both;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
  return both;
}
template <> __device__ __forceinline__ uint32_t pack<Bfloat16>(float low, float high) {
  uint32_t both;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
  return both;
}

}  // namespace flashq::cuda::ptx
