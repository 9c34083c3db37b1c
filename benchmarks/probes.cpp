// What this machine can do at most: fused multiply-adds, bf16 dot products, reads from memory. Compiled on demand for the
// host by probes.py, called through ctypes; every call starts its own threads.
#include <barrier>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <thread>
#include <vector>
#if defined(__AVX512BF16__)
#include <immintrin.h>
#endif

namespace {

#if defined(__AVX512F__)
constexpr int kVectorBytes = 64;
#elif defined(__AVX__)
constexpr int kVectorBytes = 32;
#else
constexpr int kVectorBytes = 16;
#endif
typedef float Vector __attribute__((vector_size(kVectorBytes)));
constexpr int kChains = 12;  // independent sums: latency 4 times two units, and some slack; fits 16 registers

// Seconds from when all threads have started to when the last one is done: starting 16 takes as long as some probes.
template <class Body> double timed(int threads, Body body) {
  std::barrier ready(threads);
  std::vector<std::thread> workers;
  for (int t = 1; t < threads; ++t)
    workers.emplace_back([&, t] {
      ready.arrive_and_wait();
      body(t);
    });
  ready.arrive_and_wait();
  const auto start = std::chrono::steady_clock::now();
  body(0);
  for (std::thread& worker : workers) worker.join();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

// Makes the compiler believe that somebody reads the value, without storing it anywhere.
template <class T> void keep(T& value) { asm volatile("" : "+x"(value)); }

void multiply_add(int64_t steps) {
  Vector sums[kChains] = {}, factor = Vector{} + 0.999f, term = Vector{} + 0.001f;
  keep(factor), keep(term);
  for (int64_t step = 0; step < steps; ++step) {
#pragma GCC unroll 12
    for (int i = 0; i < kChains; ++i) sums[i] = sums[i] * factor + term;
  }
  for (Vector& sum : sums) keep(sum);
}

#if defined(__AVX512BF16__)
void dot_bf16(int64_t steps) {
  __m512 sums[kChains];
  for (__m512& sum : sums) sum = _mm512_setzero_ps();
  __m512bh a = (__m512bh)_mm512_set1_epi16(0x3c00), b = a;
  keep(a), keep(b);
  for (int64_t step = 0; step < steps; ++step) {
#pragma GCC unroll 12
    for (int i = 0; i < kChains; ++i) sums[i] = _mm512_dpbf16_ps(sums[i], a, b);
  }
  for (__m512& sum : sums) keep(sum);
}
#endif

}  // namespace

extern "C" {

// Floating-point operations per second of fp32 multiply-adds (an FMA counts two) in vectors of the widest kind.
double probe_fma(int threads, int64_t steps) {
  const double operations = 2.0 * kChains * (kVectorBytes / 4) * static_cast<double>(steps) * threads;
  return operations / timed(threads, [=](int) { multiply_add(steps); });
}

// The same of bf16 dot products with fp32 sums; 0 where the machine has no such instruction.
double probe_bf16(int threads, int64_t steps) {
#if defined(__AVX512BF16__)
  return 4.0 * kChains * 16 * static_cast<double>(steps) * threads / timed(threads, [=](int) { dot_bf16(steps); });
#else
  (void)threads, (void)steps;
  return 0;
#endif
}

// Bytes per second of reading [data, data + bytes) `passes` times. Every thread reads its own part as `streams` runs side
// by side: how many of them the hardware's prefetchers like best differs between machines.
double probe_read(const void* data, int64_t bytes, int threads, int64_t passes, int streams) {
  typedef int64_t Words __attribute__((vector_size(kVectorBytes)));
  constexpr int64_t kStep = 256;
  const int64_t run = bytes / threads / streams / kStep * kStep;
  if (run == 0) return 0;
  const double seconds = timed(threads, [=](int thread) {
    const char* begin = static_cast<const char*>(data) + thread * run * streams;
    Words sums[4] = {};
    for (int64_t pass = 0; pass < passes; ++pass)
      for (int64_t at = 0; at < run; at += kStep)
        for (int stream = 0; stream < streams; ++stream) {
          const char* from = begin + stream * run + at;
          for (int64_t i = 0; i < kStep; i += kVectorBytes) {
            Words word;
            std::memcpy(&word, from + i, sizeof word);
            sums[i / kVectorBytes % 4] += word;
          }
        }
    for (Words& sum : sums) keep(sum);
  });
  return static_cast<double>(run) * streams * threads * static_cast<double>(passes) / seconds;
}
}
