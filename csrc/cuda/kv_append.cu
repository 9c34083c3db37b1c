// kv_append_: new keys and values into the slots of a paged cache. A copy whose target addresses come from `slots`.
//
// Bound by memory. A token is cut into vectors, all heads one after the other; a thread copies one vector of K and of V
// for kTokens tokens. It starts all of its loads, slots included, before it needs the first of them.
#include <cuda_runtime_api.h>

#include "cuda/check.cuh"
#include "cuda/kernels.h"
#include "cuda/launch.h"
#include "cuda/vector.cuh"

namespace flashq::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int64_t kFillingVectors = 4 * 2048;  // of K and of V, an SM: its threads hold 4 each

// Keys, or values. Strides in bytes.
struct Plane {
  const char* source;
  char* cache;
  int64_t token, head;                         // source strides
  int64_t cache_page, cache_slot, cache_head;  // cache strides
};

struct CopyParams {
  Plane planes[2];  // keys, values
  IndexView slots;
  Finding* finding;
  int64_t first_token, tokens;
  int64_t first_vector, vectors, row_vectors;  // vectors of a token, and of a head's row
  int64_t num_pages, page_size, capacity;
};

// blockDim: (vectors, tokens); grid: (groups of blockDim.y * kTokens tokens, groups of vectors).
template <class Chunk, int kTokens> __global__ void __launch_bounds__(kThreads)
    copy_kernel(const __grid_constant__ CopyParams p) {
  const int64_t vector = p.first_vector + int64_t{blockIdx.y} * blockDim.x + threadIdx.x;
  if (vector >= p.vectors) return;
  const Quotient row = divide(vector, p.row_vectors);
  const int64_t in_row = row.remainder * static_cast<int64_t>(sizeof(Chunk));
  const int64_t first = p.first_token + int64_t{blockIdx.x} * (blockDim.y * kTokens) + threadIdx.y;

  int64_t slot[kTokens];
  Chunk chunk[kTokens][2];
#pragma unroll
  for (int i = 0; i < kTokens; ++i) {
    const int64_t token = first + i * blockDim.y;
    slot[i] = -1;
    if (token >= p.tokens) continue;
    slot[i] = p.slots(token);
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const Plane& plane = p.planes[j];
      chunk[i][j] = load<Chunk>(plane.source + token * plane.token + row.quotient * plane.head + in_row);
    }
  }
#pragma unroll
  for (int i = 0; i < kTokens; ++i) {
    if (slot[i] < 0) continue;
    const Quotient place = divide(slot[i], p.page_size);
    if (place.quotient >= p.num_pages) {
      if (vector == 0) report(p.finding, Finding::kKvAppendSlot, first + i * blockDim.y, slot[i], p.capacity);
      continue;
    }
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const Plane& plane = p.planes[j];
      store(plane.cache + place.quotient * plane.cache_page + place.remainder * plane.cache_slot +
                row.quotient * plane.cache_head + in_row,
            chunk[i][j]);
    }
  }
}

template <class Chunk, int kTokens> void launch_copy(CopyParams p, cudaStream_t stream) {
  constexpr int64_t kMaxGridX = INT32_MAX, kMaxGridY = 65535;
  const int64_t groups = ceil_div(p.vectors, kThreads);
  const auto width = static_cast<unsigned>(ceil_div(p.vectors, groups));
  const dim3 block(width, kThreads / width);
  const int64_t block_tokens = int64_t{block.y} * kTokens;
  for (; p.first_vector < p.vectors; p.first_vector += kMaxGridY * width) {
    for (p.first_token = 0; p.first_token < p.tokens; p.first_token += kMaxGridX * block_tokens) {
      const dim3 grid(static_cast<unsigned>(min_of(ceil_div(p.tokens - p.first_token, block_tokens), kMaxGridX)),
                      static_cast<unsigned>(min_of(ceil_div(p.vectors - p.first_vector, width), kMaxGridY)));
      copy_kernel<Chunk, kTokens><<<grid, block, 0, stream>>>(p);
    }
  }
}

template <class Chunk> void launch_copy(const CopyParams& p, const Device& device, cudaStream_t stream) {
  // Four tokens a thread where that still fills the GPU: fewer reads of `slots` and less arithmetic a byte.
  if (p.tokens * p.vectors >= int64_t{device.sm_count} * kFillingVectors)
    launch_copy<Chunk, 4>(p, stream);
  else
    launch_copy<Chunk, 1>(p, stream);
}

Plane plane_of(const void* source, const int64_t (&source_stride)[2], void* cache, const int64_t (&cache_stride)[3],
               int64_t element) {
  return {static_cast<const char*>(source), static_cast<char*>(cache), source_stride[0] * element,
          source_stride[1] * element,       cache_stride[0] * element, cache_stride[1] * element,
          cache_stride[2] * element};
}

uintptr_t alignment_bits(const Plane& plane) {
  return reinterpret_cast<uintptr_t>(plane.source) | reinterpret_cast<uintptr_t>(plane.cache) |
         static_cast<uintptr_t>(plane.token | plane.head | plane.cache_page | plane.cache_slot | plane.cache_head);
}

}  // namespace

Status kv_append(const KvAppendParams& p, const Launch& launch) {
  Device device;
  if (const Status status = enter(launch, device); !status.ok()) return status;
  const AppendSource& s = p.source;
  if (s.tokens == 0 || s.kv_heads == 0 || s.head_dim == 0) return {};
  const int64_t element = s.dtype == Dtype::kFloat32 ? 4 : 2, row_bytes = s.head_dim * element;
  CopyParams copy{};
  copy.planes[0] = plane_of(s.k, s.k_stride, p.k_cache, p.k_stride, element);
  copy.planes[1] = plane_of(s.v, s.v_stride, p.v_cache, p.v_stride, element);
  copy.slots = s.slots;
  copy.finding = finding_of(launch);
  copy.tokens = s.tokens;
  copy.num_pages = p.page_size == 0 ? 0 : p.num_pages;  // pages of no slots: every slot is out of range
  copy.page_size = max_of<int64_t>(p.page_size, 1);
  if (__builtin_mul_overflow(copy.num_pages, copy.page_size, &copy.capacity)) copy.capacity = INT64_MAX;
  const int bytes = widest_vector(alignment_bits(copy.planes[0]) | alignment_bits(copy.planes[1]) |
                                  static_cast<uintptr_t>(row_bytes));
  copy.row_vectors = row_bytes / bytes;
  copy.vectors = s.kv_heads * copy.row_vectors;
  const auto stream = static_cast<cudaStream_t>(launch.stream);
  switch (bytes) {
    case 16: launch_copy<Vector<uint32_t, 4>>(copy, device, stream); break;
    case 8: launch_copy<Vector<uint32_t, 2>>(copy, device, stream); break;
    case 4: launch_copy<uint32_t>(copy, device, stream); break;
    default: launch_copy<uint16_t>(copy, device, stream); break;
  }
  return launch_status();
}

}  // namespace flashq::cuda
