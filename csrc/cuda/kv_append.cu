// kv_append_: new keys and values into the slots of a paged cache. A copy whose target addresses come from `slots`.
//
// Bound by memory. A token is cut into vectors, all heads one after the other, and a thread copies one vector of K and
// one of V. It starts both loads and that of the slot before it needs any of them. More tokens a thread are
// slower: 19.6 us with 8 of them, 19.0 with 1, for 8192 tokens of 8 heads of 128 values in 16 bits on an H200.
#include <cuda_runtime_api.h>

#include "cuda/kernels.h"
#include "cuda/launch.h"
#include "cuda/vector.cuh"

namespace flashq::cuda {
namespace {

constexpr int kThreads = 128;

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
  int64_t first_token, tokens;
  int64_t first_vector, vectors;   // of a token
  Divisor row_vectors, page_size;  // vectors of a head's row; slots of a page
  int64_t num_pages;
};

// blockDim: (vectors, tokens); grid: (groups of tokens, groups of vectors).
template <class Chunk> __global__ void __launch_bounds__(kThreads) copy_kernel(const __grid_constant__ CopyParams p) {
  const int64_t vector = p.first_vector + int64_t{blockIdx.y} * blockDim.x + threadIdx.x;
  const int64_t token = p.first_token + int64_t{blockIdx.x} * blockDim.y + threadIdx.y;
  if (vector >= p.vectors || token >= p.tokens) return;
  const Quotient row = divide(vector, p.row_vectors);
  const int64_t in_row = row.remainder * static_cast<int64_t>(sizeof(Chunk));

  const int64_t slot = p.slots(token);
  Chunk chunk[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const Plane& plane = p.planes[i];
    chunk[i] = load<Chunk>(plane.source + token * plane.token + row.quotient * plane.head + in_row);
  }
  if (slot < 0) return;
  const Quotient place = divide(slot, p.page_size);
  if (place.quotient >= p.num_pages) return;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const Plane& plane = p.planes[i];
    store(plane.cache + place.quotient * plane.cache_page + place.remainder * plane.cache_slot +
              row.quotient * plane.cache_head + in_row,
          chunk[i]);
  }
}

template <class Chunk> void launch_copy(CopyParams p, cudaStream_t stream) {
  constexpr int64_t kMaxGridX = INT32_MAX, kMaxGridY = 65535;
  const int64_t groups = ceil_div(p.vectors, kThreads);
  const auto width = static_cast<unsigned>(ceil_div(p.vectors, groups));
  const dim3 block(width, kThreads / width);
  for (; p.first_vector < p.vectors; p.first_vector += kMaxGridY * width) {
    for (p.first_token = 0; p.first_token < p.tokens; p.first_token += kMaxGridX * block.y) {
      const dim3 grid(static_cast<unsigned>(min_of(ceil_div(p.tokens - p.first_token, block.y), kMaxGridX)),
                      static_cast<unsigned>(min_of(ceil_div(p.vectors - p.first_vector, width), kMaxGridY)));
      copy_kernel<Chunk><<<grid, block, 0, stream>>>(p);
    }
  }
}

Plane plane_of(const void* source, const int64_t (&source_stride)[2], void* cache, const int64_t (&cache_stride)[3],
               int64_t element) {
  return {static_cast<const char*>(source), static_cast<char*>(cache), source_stride[0] * element,
          source_stride[1] * element,       cache_stride[0] * element, cache_stride[1] * element,
          cache_stride[2] * element};
}

}  // namespace

Status kv_append(const KvAppendParams& p, const Launch& launch) {
  if (const Status status = enter(launch); !status.ok()) return status;
  const AppendSource& s = p.source;
  if (s.tokens == 0 || s.kv_heads == 0 || s.head_dim == 0) return {};
  const int64_t element = size_of(s.dtype), row_bytes = s.head_dim * element;
  const Plane planes[2] = {plane_of(s.k, s.k_stride, p.k_cache, p.k_stride, element),
                           plane_of(s.v, s.v_stride, p.v_cache, p.v_stride, element)};
  const int bytes = widest_vector(address_bits(s.k, s.k_stride, element) | address_bits(s.v, s.v_stride, element) |
                                  address_bits(p.k_cache, p.k_stride, element) |
                                  address_bits(p.v_cache, p.v_stride, element) | static_cast<uintptr_t>(row_bytes));
  const int64_t row_vectors = row_bytes / bytes, page_size = max_of<int64_t>(p.page_size, 1);
  const CopyParams copy{
      .planes = {planes[0], planes[1]},
      .slots = s.slots,
      .first_token = 0,
      .tokens = s.tokens,
      .first_vector = 0,
      .vectors = s.kv_heads * row_vectors,
      .row_vectors = Divisor(row_vectors),
      .page_size = Divisor(page_size),
      .num_pages = p.page_size == 0 ? 0 : p.num_pages,  // pages of no slots: every slot is out of range
  };
  const auto stream = static_cast<cudaStream_t>(launch.stream);
  switch (bytes) {
    case 16: launch_copy<Vector<uint32_t, 4>>(copy, stream); break;
    case 8: launch_copy<Vector<uint32_t, 2>>(copy, stream); break;
    case 4: launch_copy<uint32_t>(copy, stream); break;
    default: launch_copy<uint16_t>(copy, stream); break;
  }
  return launch_status();
}

}  // namespace flashq::cuda
