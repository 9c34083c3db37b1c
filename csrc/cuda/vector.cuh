// Neighbouring values that one thread moves at once, and index arithmetic that all kernels share.
#pragma once
#include <type_traits>

#include "core/half.h"

namespace flashq::cuda {

inline constexpr int kVectorBytes = 16;  // the widest load and store of a thread

template <class Storage, int kVector> struct alignas(sizeof(Storage) * kVector) Vector { Storage value[kVector]; };

template <class Chunk> __device__ __forceinline__ Chunk load(const void* from) {
  return *static_cast<const Chunk*>(from);
}
template <class Chunk> __device__ __forceinline__ void store(void* to, const Chunk& chunk) {
  *static_cast<Chunk*>(to) = chunk;
}

// 16 bytes to global memory in one instruction: of an assignment the compiler may make four, for values that it works
// out one by one.
template <class Chunk> __device__ __forceinline__ void store_global(void* to, const Chunk& chunk) {
  static_assert(sizeof(Chunk) == kVectorBytes);
  const auto words = __builtin_bit_cast(uint4, chunk);
  asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(__cvta_generic_to_global(to)), "r"(words.x),
               "r"(words.y), "r"(words.z), "r"(words.w)
               : "memory");
}

// kCount neighbouring values of T (Float32, Float16, Bfloat16), in words of 32 bits where they fill some: of 16-bit
// members the compiler gives each a register of its own from the load on.
template <class T, int kCount> struct Packed {
  using Storage = typename T::Storage;
  static constexpr int kBytes = kCount * static_cast<int>(sizeof(Storage));
  using Word = std::conditional_t<kBytes % 4 == 0, uint32_t, uint16_t>;
  static constexpr int kInWord = sizeof(Word) / sizeof(Storage);

  Vector<Word, kCount / kInWord> words;

  __device__ float get(int i) const {
    const Word word = words.value[i / kInWord];
    if constexpr (sizeof(Storage) == 4)
      return float_of(word);
    else
      return T::load(static_cast<uint16_t>(word >> (16 * (i % kInWord))));
  }
  // Of 16-bit values in the order of i: the first of a word overwrites it.
  __device__ void set(int i, float x) {
    if constexpr (sizeof(Storage) == 4) {
      words.value[i] = bits_of(x);
    } else {
      const Word bits = static_cast<Word>(Word{T::store(x)} << (16 * (i % kInWord)));
      Word& word = words.value[i / kInWord];
      word = i % kInWord ? static_cast<Word>(word | bits) : bits;
    }
  }
};

// What divides the addresses of rows: the bits of their base and of the strides between them (elements), or-ed.
[[nodiscard]] inline uintptr_t address_bits(const void* base) { return reinterpret_cast<uintptr_t>(base); }
template <size_t kDims>
[[nodiscard]] uintptr_t address_bits(const void* base, const int64_t (&stride)[kDims], int64_t element_bytes) {
  uintptr_t all = address_bits(base);
  for (const int64_t x : stride) all |= static_cast<uintptr_t>(x * element_bytes);
  return all;
}

// The widest vector, in bytes, up to kVectorBytes, that fits every address whose address_bits() are or-ed in `all`.
[[nodiscard]] inline int widest_vector(uintptr_t all) {
  all |= kVectorBytes;
  return static_cast<int>(all & (~all + 1));
}

// Whether every row of 16-bit values can be read in vectors of 16 bytes.
template <size_t kDims> [[nodiscard]] bool rows_fit_vectors(const void* base, const int64_t (&stride)[kDims]) {
  return widest_vector(address_bits(base, stride, 2)) == kVectorBytes;
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

// A divisor that the host knows: dividing by it takes 5 instructions where dividend and divisor are below 2^31.
struct Divisor {
  int64_t value;
  uint32_t multiplier = 0, shift = 0;  // of 2^31 and above: the multiplier is 0

  explicit Divisor(int64_t divisor) : value(divisor) {
    if (divisor < 1 || divisor > INT32_MAX) return;
    while ((int64_t{1} << shift) < divisor) ++shift;
    // n / d = (n + (n * m >> 32)) >> shift, with m = 2^32 * (2^shift - d) / d + 1, for all n below 2^31
    multiplier = static_cast<uint32_t>((((int64_t{1} << shift) - divisor) << 32) / divisor + 1);
  }

  // n / value, both from 0 and below 2^31.
  __device__ __forceinline__ int quotient(int n) const {
    const auto x = static_cast<uint32_t>(n);
    return static_cast<int>((__umulhi(x, multiplier) + x) >> shift);
  }
};

__device__ __forceinline__ Quotient divide(int64_t a, const Divisor& b) {
  if (a > INT32_MAX || b.multiplier == 0) return {a / b.value, a % b.value};
  const auto x = static_cast<uint32_t>(a);
  const uint32_t quotient = (__umulhi(x, b.multiplier) + x) >> b.shift;
  return {quotient, x - quotient * static_cast<uint32_t>(b.value)};
}

}  // namespace flashq::cuda
