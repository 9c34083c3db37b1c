// Tensor core products of a warpgroup (sm_90a): D (64 x kN, fp32, registers) += A (64 x 16) * B (16 x kN).
//
// Accumulator element 4 j + 2 h + e of a thread is row 16 * warp + lane / 4 + 8 * h, column 8 * j + 2 * (lane % 4) + e.
// Eight of them (16 columns), packed in pairs to 16 bits, are the A operand of the next product, in order.
//
// The product runs on after the instruction. Until wgmma_wait, its registers and shared memory are its own; `pin` keeps
// the compiler, which does not know that, from moving code over the issue and the wait (it would otherwise warn that it
// serialises, and do so).
#pragma once
#include "core/half.h"
#include "cuda/ptx/ldmatrix.cuh"

namespace flashq::cuda::ptx {

__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int kPending> __device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}
template <int kCount> __device__ __forceinline__ void pin(float (&registers)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(registers[i])::"memory");
}

// Describes an operand in shared memory, in boxes of 64 columns with the 128-byte swizzle, 1024-byte aligned; offsets
// are in units of 16 bytes. 8 rows of a box are one atom of 1024 bytes, and the stride to the next.
//   K-major (rows are the M or N index, columns the K index): the next 16 columns are 32 bytes further.
//   MN-major (rows are the K index): `leading_bytes` is the size of a box, the next 16 rows are 2048 bytes further.
__device__ __forceinline__ uint64_t matrix_descriptor(const void* at, uint32_t leading_bytes) {
  return uint64_t{1} << 62 | uint64_t{1024 >> 4} << 32 | uint64_t{leading_bytes >> 4} << 16 |
         (shared_address(at) & 0x3ffff) >> 4;
}

template <class T> struct PtxType;
template <> struct PtxType<Float16> { static constexpr char kName[] = "f16"; };
template <> struct PtxType<Bfloat16> { static constexpr char kName[] = "bf16"; };

// ss: D (+)= A * B, both in shared memory, K-major. rs: D += A * B, A in registers, B in shared memory, MN-major, or
// K-major with kTransposed 0.
template <int kN> struct Wgmma;

// An asm statement has to spell out every register, so the sizes are generated: TEXT_n names the operands %0 to
// %(n - 1), BIND_n binds them to d[].
#define TEXT_10(t) "%" #t "0,%" #t "1,%" #t "2,%" #t "3,%" #t "4,%" #t "5,%" #t "6,%" #t "7,%" #t "8,%" #t "9"
#define TEXT_40 TEXT_10() "," TEXT_10(1) "," TEXT_10(2) "," TEXT_10(3)
#define TEXT_4 "%0,%1,%2,%3"
#define TEXT_16 TEXT_10() ",%10,%11,%12,%13,%14,%15"
#define TEXT_24 TEXT_10() "," TEXT_10(1) ",%20,%21,%22,%23"
#define TEXT_32 TEXT_10() "," TEXT_10(1) "," TEXT_10(2) ",%30,%31"
#define TEXT_48 TEXT_40 ",%40,%41,%42,%43,%44,%45,%46,%47"
#define TEXT_56 TEXT_40 "," TEXT_10(4) ",%50,%51,%52,%53,%54,%55"
#define TEXT_64 TEXT_40 "," TEXT_10(4) "," TEXT_10(5) ",%60,%61,%62,%63"
#define TEXT_80 TEXT_40 "," TEXT_10(4) "," TEXT_10(5) "," TEXT_10(6) "," TEXT_10(7)
#define TEXT_128 \
  TEXT_80 "," TEXT_10(8) "," TEXT_10(9) "," TEXT_10(10) "," TEXT_10(11) ",%120,%121,%122,%123,%124," \
          "%125,%126,%127"
#define BIND_8(i)                                                                                             \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), \
      "+f"(d[i + 7])
#define BIND_4 "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
#define BIND_16 BIND_8(0), BIND_8(8)
#define BIND_32_AT(i) BIND_8(i), BIND_8(i + 8), BIND_8(i + 16), BIND_8(i + 24)
#define BIND_24 BIND_16, BIND_8(16)
#define BIND_32 BIND_32_AT(0)
#define BIND_40 BIND_32_AT(0), BIND_8(32)
#define BIND_48 BIND_32_AT(0), BIND_8(32), BIND_8(40)
#define BIND_56 BIND_32_AT(0), BIND_8(32), BIND_8(40), BIND_8(48)
#define BIND_64 BIND_32_AT(0), BIND_32_AT(32)
#define BIND_128 BIND_64, BIND_32_AT(64), BIND_32_AT(96)
// kN, its accumulators, and the numbers of the operands behind them.
#define DEFINE_WGMMA(N, COUNT, O0, O1, O2, O3, O4, O5, O6)                                                          \
  template <> struct Wgmma<N> {                                                                                     \
    template <class T>                                                                                              \
    static __device__ __forceinline__ void ss(float (&d)[COUNT], uint64_t a, uint64_t b, int accumulate) {          \
      asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #O2 ", 0;\nwgmma.mma_async.sync.aligned.m64n" #N            \
                   "k16.f32.%" #O3 ".%" #O3 " {" TEXT_##COUNT "}, %" #O0 ", %" #O1 ", p, 1, 1, 0, 0;\n}\n"          \
                   : BIND_##COUNT                                                                                   \
                   : "l"(a), "l"(b), "r"(accumulate), "C"(PtxType<T>::kName));                                      \
    }                                                                                                               \
    template <class T, int kTransposed = 1>                                                                         \
    static __device__ __forceinline__ void rs(float (&d)[COUNT], const uint32_t (&a)[4], uint64_t b) {              \
      asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, 1, 0;\nwgmma.mma_async.sync.aligned.m64n" #N "k16.f32.%" #O5   \
                   ".%" #O5 " {" TEXT_##COUNT "}, {%" #O0 ",%" #O1 ",%" #O2 ",%" #O3 "}, %" #O4 ", p, 1, 1, %" #O6  \
                                              ";\n}\n"                                                              \
                   : BIND_##COUNT                                                                                   \
                   : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "C"(PtxType<T>::kName), "n"(kTransposed)); \
    }                                                                                                               \
  };
DEFINE_WGMMA(8, 4, 4, 5, 6, 7, 8, 9, 10)
DEFINE_WGMMA(32, 16, 16, 17, 18, 19, 20, 21, 22)
DEFINE_WGMMA(48, 24, 24, 25, 26, 27, 28, 29, 30)
DEFINE_WGMMA(64, 32, 32, 33, 34, 35, 36, 37, 38)
DEFINE_WGMMA(80, 40, 40, 41, 42, 43, 44, 45, 46)
DEFINE_WGMMA(96, 48, 48, 49, 50, 51, 52, 53, 54)
DEFINE_WGMMA(112, 56, 56, 57, 58, 59, 60, 61, 62)
DEFINE_WGMMA(128, 64, 64, 65, 66, 67, 68, 69, 70)
DEFINE_WGMMA(256, 128, 128, 129, 130, 131, 132, 133, 134)
#undef DEFINE_WGMMA
#undef BIND_128
#undef BIND_64
#undef BIND_56
#undef BIND_48
#undef BIND_16
#undef BIND_4
#undef BIND_40
#undef BIND_32
#undef BIND_24
#undef BIND_32_AT
#undef BIND_8
#undef TEXT_128
#undef TEXT_80
#undef TEXT_64
#undef TEXT_56
#undef TEXT_48
#undef TEXT_16
#undef TEXT_4
#undef TEXT_32
#undef TEXT_24
#undef TEXT_40
#undef TEXT_10

}  // namespace flashq::cuda::ptx
