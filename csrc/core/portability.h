// What lets one definition serve the C++ compiler, nvcc's host pass and nvcc's device pass.
#pragma once
#include <cstdint>

// Always inlined, so that the objects built for one instruction set never emit a weak copy that the linker could keep
// for all of them.
#define FLASHQ_HOST __attribute__((always_inline)) inline
#if defined(__CUDACC__)
#define FLASHQ_HD __host__ __device__ __forceinline__
#else
#define FLASHQ_HD FLASHQ_HOST
#endif

// Before a loop whose arrays have to stay in registers. The C++ compiler gets no hint: it vectorises such loops.
#if defined(__CUDA_ARCH__)
#define FLASHQ_UNROLL _Pragma("unroll")
#else
#define FLASHQ_UNROLL
#endif

namespace flashq {

inline constexpr float kInf = __builtin_inff();
inline constexpr float kLog2E = 1.44269504088896340736f;
inline constexpr float kLn2 = 0.69314718055994530942f;

template <class T> FLASHQ_HD constexpr T min_of(T a, T b) { return b < a ? b : a; }
template <class T> FLASHQ_HD constexpr T max_of(T a, T b) { return a < b ? b : a; }
FLASHQ_HD constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
FLASHQ_HD constexpr int64_t round_up(int64_t a, int64_t b) { return ceil_div(a, b) * b; }

}  // namespace flashq
