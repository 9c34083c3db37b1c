// Rows between global memory, where each lies somewhere, and a warp's shared memory.
#pragma once
#include "cuda/ptx/cp_async.cuh"
#include "cuda/vector.cuh"

namespace flashq::cuda {

// Starts to copy a warp's rows, which kLanes neighbouring lanes share, to shared memory. `from` is this lane's row, or
// null: then its place gets zeros.
template <int kRowBytes, int kRowStride, int kLanes>
__device__ __forceinline__ void start_copies(char* rows, const char* from) {
  constexpr int kChunks = kRowBytes / kVectorBytes;  // of a row
  constexpr int kRows = 32 / kChunks, kSteps = 32 / kLanes / kRows;
  static_assert(kChunks <= 32 && 32 % kChunks == 0 && kSteps > 0);
  const int lane = static_cast<int>(threadIdx.x) % 32, row = lane / kChunks, column = lane % kChunks * kVectorBytes;
  const auto to = static_cast<uint32_t>(__cvta_generic_to_shared(rows)) + row * kRowStride + column;
  const auto row_of = [&](int i) {
    return reinterpret_cast<const char*>(__shfl_sync(~0u, reinterpret_cast<uintptr_t>(from), i * kLanes));
  };
  const char* const first = row_of(0);
  const int64_t stride = row_of(1) - first;
  if (__all_sync(~0u, from && from == first + lane / kLanes * stride)) {  // evenly spaced
    const char* chunk = first + row * stride + column;
#pragma unroll
    for (int i = 0; i < kSteps; ++i) ptx::cp_async_16(to + i * kRows * kRowStride, chunk + i * kRows * stride, true);
  } else {
#pragma unroll 1
    for (int i = 0; i < kSteps; ++i) {
      const char* const its = row_of(i * kRows + row);
      ptx::cp_async_16(to + i * kRows * kRowStride, its + column, its != nullptr);
    }
  }
  ptx::cp_async_commit();
}

// Rows of a group that lie evenly: where the first is, bytes from one to the next, and how many there are.
struct EvenRows {
  const char* first;
  int64_t stride;
  int count;
};
// As start_copies(); the places of rows that are not there get zeros.
template <int kRowBytes, int kRowStride, int kLanes>
__device__ __forceinline__ void start_even_copies(char* rows, const EvenRows& from) {
  constexpr int kChunks = kRowBytes / kVectorBytes, kRows = 32 / kChunks, kSteps = 32 / kLanes / kRows;
  const int lane = static_cast<int>(threadIdx.x) % 32, row = lane / kChunks, column = lane % kChunks * kVectorBytes;
  const auto to = static_cast<uint32_t>(__cvta_generic_to_shared(rows)) + row * kRowStride + column;
  const char* chunk = from.first + row * from.stride + column;
  if (from.count == 32 / kLanes) {
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      ptx::cp_async_16(to + i * kRows * kRowStride, chunk, true);
      chunk += kRows * from.stride;
    }
  } else {
#pragma unroll 1
    for (int i = 0; i < kSteps; ++i) {
      ptx::cp_async_16(to + i * kRows * kRowStride, chunk, row + i * kRows < from.count);
      chunk += kRows * from.stride;
    }
  }
  ptx::cp_async_commit();
}

}  // namespace flashq::cuda
