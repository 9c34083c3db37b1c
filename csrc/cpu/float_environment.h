// IEEE arithmetic for the length of a scope, whatever torch.set_flush_denormal or the caller left on this thread.
#pragma once
#include <cstdint>

namespace flashq {

// Gradual underflow, round to nearest even, no traps. The arithmetic has to stand in a function that is not inlined
// into the scope: compilers move floating-point operations across writes of the control register.
class IeeeScope {
 public:
  __attribute__((always_inline)) IeeeScope() noexcept : saved_(read()) { write(kIeee); }
  __attribute__((always_inline)) ~IeeeScope() { write(saved_); }
  IeeeScope(const IeeeScope&) = delete;
  IeeeScope& operator=(const IeeeScope&) = delete;

 private:
#if defined(__SSE__)
  using Word = uint32_t;
  static constexpr Word kIeee = 0x1f80;  // MXCSR: exceptions masked, nearest even, FTZ and DAZ off
  __attribute__((always_inline)) static Word read() noexcept {
    Word word;
    asm volatile("stmxcsr %0" : "=m"(word));
    return word;
  }
  __attribute__((always_inline)) static void write(Word word) noexcept {
    asm volatile("ldmxcsr %0" : : "m"(word) : "memory");
  }
#elif defined(__aarch64__)
  using Word = uint64_t;
  static constexpr Word kIeee = 0;  // FPCR: the same
  __attribute__((always_inline)) static Word read() noexcept {
    Word word;
    asm volatile("mrs %0, fpcr" : "=r"(word));
    return word;
  }
  __attribute__((always_inline)) static void write(Word word) noexcept {
    asm volatile("msr fpcr, %0" : : "r"(word) : "memory");
  }
#else
  using Word = uint32_t;
  static constexpr Word kIeee = 0;
  __attribute__((always_inline)) static Word read() noexcept { return 0; }
  __attribute__((always_inline)) static void write(Word) noexcept {}
#endif
  Word saved_;
};

}  // namespace flashq
