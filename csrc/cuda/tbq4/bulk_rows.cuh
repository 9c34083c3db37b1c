// 32 rows between global memory, where each lies somewhere, and a warp's shared memory, where a lane owns a row.
#pragma once
#include "cuda/ptx/cp_async.cuh"
#include "cuda/ptx/fresh_thread.cuh"
#include "cuda/vector.cuh"

namespace flashq::cuda {

// Copies 32 rows to shared memory. `from` is this lane's row, or null: then its place gets zeros.
template <int kRowBytes, int kRowStride>
__device__ __forceinline__ void start_copies(char* rows, const char* from, int lane) {
  constexpr int kChunks = kRowBytes / kVectorBytes;  // of a row
  constexpr int kRows = 32 / kChunks == 0 ? 1 : 32 / kChunks, kSteps = 32 / kRows;
  static_assert(kChunks <= 32 && 32 % kChunks == 0);
  const int row = lane / kChunks, column = lane % kChunks * kVectorBytes;
  const auto to = static_cast<uint32_t>(__cvta_generic_to_shared(rows)) + row * kRowStride + column;
  const char* first = reinterpret_cast<const char*>(__shfl_sync(~0u, reinterpret_cast<uintptr_t>(from), 0));
  if (__all_sync(~0u, from == first + lane * kRowBytes)) {  // one piece of memory: one address
    const char* chunk = first + lane * kVectorBytes;
#pragma unroll
    for (int i = 0; i < kSteps; ++i) ptx::cp_async_16(to + i * kRows * kRowStride, chunk + i * kRows * kRowBytes, true);
  } else {
#pragma unroll 1  // the caller has no registers left for more addresses
    for (int i = 0; i < kSteps; ++i) {
      const auto its =
          reinterpret_cast<const char*>(__shfl_sync(~0u, reinterpret_cast<uintptr_t>(from), i * kRows + row));
      ptx::cp_async_16(to + i * kRows * kRowStride, its + column, its != nullptr);
    }
  }
  ptx::cp_async_commit();
}

// Copies 32 rows of shared memory away. `to` is where this lane's row goes, or null.
template <int kRowBytes, int kRowStride> __device__ __forceinline__ void copy_out(const char* rows, char* to,
                                                                                  int lane) {
  constexpr int kChunks = kRowBytes / kVectorBytes, kRows = 32 / kChunks;
  const int row = lane / kChunks, column = lane % kChunks * kVectorBytes;
#pragma unroll
  for (int i = 0; i < 32 / kRows; ++i) {
    char* its = reinterpret_cast<char*>(__shfl_sync(~0u, reinterpret_cast<uintptr_t>(to), i * kRows + row));
    const auto chunk = load<Vector<uint32_t, 4>>(rows + (i * kRows + row) * kRowStride + column);
    if (its) store(its + column, chunk);
  }
}

// The same to one piece of memory, of which only the first `count` rows exist.
template <int kRowBytes, int kRowStride>
__device__ __forceinline__ void copy_out(const char* rows, char* to, int lane, int count) {
  constexpr int kChunks = kRowBytes / kVectorBytes, kRows = 32 / kChunks;
  const int row = lane / kChunks;
  rows += row * kRowStride + lane % kChunks * kVectorBytes;
  to += lane * kVectorBytes;
#pragma unroll 8
  for (int i = 0; i < 32 / kRows; ++i) {
    const auto chunk = load<Vector<uint32_t, 4>>(rows + i * kRows * kRowStride);
    if (i * kRows + row < count) store(to + i * kRows * kRowBytes, chunk);
  }
}

}  // namespace flashq::cuda
