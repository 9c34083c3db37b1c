// What this GPU can do at most, and helpers for timing: an empty kernel, a kernel that only waits, reads of memory,
// copies. Compiled on demand by gpu_probes.py, called through ctypes. All functions launch on the given stream, can be
// captured in a graph, and return a cudaError_t.
#include <cuda_runtime.h>

#include <cstdint>

namespace {

constexpr int kThreads = 256;

__global__ void empty_kernel() {}

__global__ void spin_kernel(int64_t nanoseconds) {
  int64_t start, now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(start));
  do {
    __nanosleep(500);
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  } while (now - start < nanoseconds);
}

__device__ uint4 load_once(const uint4* from) {
  uint4 v;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(from));
  return v;
}

// kCopy: stores what it loads; else ORs it together and stores that only for one value, so that no load can be left
// out.
template <int kUnroll, bool kCopy> __global__ void __launch_bounds__(kThreads)
    stream_kernel(const uint4* __restrict__ from, uint4* __restrict__ to, int64_t count) {
  const int64_t step = int64_t{gridDim.x} * kThreads;
  uint32_t bits = 0;
  int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  for (; i + (kUnroll - 1) * step < count; i += kUnroll * step) {
    uint4 v[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) v[u] = load_once(from + i + u * step);
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      if constexpr (kCopy)
        __stcs(to + i + u * step, v[u]);
      else
        bits |= v[u].x | v[u].y | v[u].z | v[u].w;
    }
  }
  for (; i < count; i += step) {
    const uint4 v = load_once(from + i);
    if constexpr (kCopy)
      __stcs(to + i, v);
    else
      bits |= v.x | v.y | v.z | v.w;
  }
  if (!kCopy && bits == 0x12345678u) to[0] = uint4{bits, bits, bits, bits};
}

template <bool kCopy> int launch(const void* from, void* to, int64_t bytes, int blocks_per_sm, int unroll,
                                 cudaStream_t stream) {
  int device = 0, sms = 0;
  if (const cudaError_t error = cudaGetDevice(&device)) return error;
  if (const cudaError_t error = cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, device)) return error;
  const auto kernel = unroll == 8 ? stream_kernel<8, kCopy> : stream_kernel<4, kCopy>;
  kernel<<<sms * blocks_per_sm, kThreads, 0, stream>>>(static_cast<const uint4*>(from), static_cast<uint4*>(to),
                                                       bytes / static_cast<int64_t>(sizeof(uint4)));
  return cudaGetLastError();
}

}  // namespace

extern "C" {

int probe_empty(void* stream) {
  empty_kernel<<<1, 32, 0, static_cast<cudaStream_t>(stream)>>>();
  return cudaGetLastError();
}

// Keeps the stream busy while the host queues what comes next.
int probe_spin(int64_t nanoseconds, void* stream) {
  spin_kernel<<<1, 1, 0, static_cast<cudaStream_t>(stream)>>>(nanoseconds);
  return cudaGetLastError();
}

// Reads `bytes` (a multiple of 16) once; `sink` are 16 bytes that may be written.
int probe_read(const void* data, void* sink, int64_t bytes, int blocks_per_sm, int unroll, void* stream) {
  return launch<false>(data, sink, bytes, blocks_per_sm, unroll, static_cast<cudaStream_t>(stream));
}

int probe_copy(const void* from, void* to, int64_t bytes, int blocks_per_sm, int unroll, void* stream) {
  return launch<true>(from, to, bytes, blocks_per_sm, unroll, static_cast<cudaStream_t>(stream));
}
}
