// Rows of 16-bit values from global to shared memory, as the operands of ldmatrix.
#pragma once
#include "cuda/ptx/cp_async.cuh"
#include "cuda/ptx/fresh_thread.cuh"
#include "cuda/ptx/ldmatrix.cuh"
#include "cuda/vector.cuh"

namespace flashq::cuda {

// A tile (rows, kDim) in shared memory, aligned to 1,024 bytes. Chunks of 16 bytes are exchanged within groups of
// eight by row % 8, so that eight rows of one chunk lie in different banks. Columns past the head dim hold zeros.
template <int kDim> struct SharedTile {
  static constexpr int kRowBytes = kDim * 2, kChunks = kDim / 8;

  static __device__ __forceinline__ uint32_t offset(int row, int chunk) {
    return static_cast<uint32_t>(row * kRowBytes + ((chunk ^ (row & 7)) << 4));
  }
  // Where this lane's row of a 16 x 16 operand starts; ^ 32 * c gives the operand 16 * c columns further on. The lane's
  // 8 x 8 tile is the one right of the first if `right`, below it if `below`.
  static __device__ __forceinline__ uint32_t lane_offset(int first_row, bool right, bool below) {
    return offset(first_row + 8 * below + threadIdx.x % 8, right);
  }
};

// Which chunk of which rows this thread copies: rows `row`, row + kStep, ...
template <int kDim, int kThreads> struct CopyLane {
  static constexpr int kChunks = kDim / 8, kStep = kThreads / kChunks;
  int row, chunk;

  __device__ __forceinline__ explicit CopyLane(int thread) : row(thread / kChunks), chunk(thread % kChunks) {}
};

// 16 bytes at any even address, or zeros.
__device__ __forceinline__ void copy_chunk_narrow(uint32_t to, const void* from, bool wanted) {
  uint32_t word[4] = {};
  if (wanted) {
    const auto* half = static_cast<const uint16_t*>(from);
#pragma unroll
    for (int i = 0; i < 4; ++i) word[i] = half[2 * i] | uint32_t{half[2 * i + 1]} << 16;
  }
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(word[0]), "r"(word[1]), "r"(word[2]),
               "r"(word[3])
               : "memory");
}

// kRows rows at from, from + stride, ... (bytes); those outside [begin, end) become zeros and are not read.
template <int kDim, int kRows, int kThreads>
__device__ __forceinline__ void copy_rows(uint32_t tile, const char* from, int64_t stride, bool wanted, int begin,
                                          int end) {
  const CopyLane<kDim, kThreads> lane(static_cast<int>(threadIdx.x));
  from += lane.row * stride + lane.chunk * 16;
  const int64_t step = lane.kStep * stride;
  if (begin <= 0 && end >= kRows) {
#pragma unroll
    for (int i = 0; i < kRows / lane.kStep; ++i) {
      ptx::cp_async_16(tile + SharedTile<kDim>::offset(lane.row + i * lane.kStep, lane.chunk), from, wanted);
      from += step;
    }
    return;
  }
#pragma unroll
  for (int i = 0; i < kRows / lane.kStep; ++i) {
    const int row = lane.row + i * lane.kStep;
    ptx::cp_async_16(tile + SharedTile<kDim>::offset(row, lane.chunk), from, wanted && row >= begin && row < end);
    from += step;
  }
}

}  // namespace flashq::cuda
