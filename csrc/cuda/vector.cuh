// Neighbouring values that one thread moves at once, and index arithmetic that all kernels share.
#pragma once
#include "core/portability.h"

namespace flashq::cuda {

inline constexpr int kVectorBytes = 16;  // the widest load and store of a thread

template <class Storage, int kVector> struct alignas(sizeof(Storage) * kVector) Vector { Storage value[kVector]; };

template <class Chunk> __device__ __forceinline__ Chunk load(const void* from) {
  return *static_cast<const Chunk*>(from);
}
template <class Chunk> __device__ __forceinline__ void store(void* to, const Chunk& chunk) {
  *static_cast<Chunk*>(to) = chunk;
}

// The widest vector, in bytes, up to kVectorBytes, that fits every address and byte stride whose bits are or-ed in
// `all`.
[[nodiscard]] inline int widest_vector(uintptr_t all) {
  all |= kVectorBytes;
  return static_cast<int>(all & (~all + 1));
}

struct Quotient { int64_t quotient, remainder; };

// a / b for a, b >= 0. 64-bit divisions cost some 70 instructions each, 32-bit ones 20.
__device__ __forceinline__ Quotient divide(int64_t a, int64_t b) {
  if (((a | b) >> 32) == 0) {
    const auto x = static_cast<uint32_t>(a), y = static_cast<uint32_t>(b);
    return {x / y, x % y};
  }
  return {a / b, a % b};
}

}  // namespace flashq::cuda
