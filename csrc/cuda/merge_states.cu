// merge_states: partial attention results over disjoint keys to the result over all of them.
//
// Bound by memory: it reads K * head_dim values a row and writes head_dim. A thread owns one 16-byte vector of a row
// (one value where strides or bases rule vectors out) and walks the partials in order by itself: neighbours read
// neighbouring vectors, the weights are recomputed by every thread instead of passed around, and nothing is shared.
#include <cuda_runtime_api.h>

#include "core/half.h"
#include "core/softmax_state.h"
#include "cuda/kernels.h"
#include "cuda/launch.h"

namespace flashq::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kMaxRowThreads = 64;  // threads side by side in a row; wider rows are walked
constexpr int kVectorBytes = 16;

template <class Storage, int kVector> struct alignas(sizeof(Storage) * kVector) Vector {
  Storage value[kVector];
};

struct Row {
  int64_t batch, token, head;
};

// 64-bit divisions cost some 70 instructions each, more than the merge of a few partials.
__device__ Row row_of(const MergeParams& p, int64_t i) {
  if (i <= UINT32_MAX && p.heads <= UINT32_MAX && p.tokens <= UINT32_MAX) {
    const auto heads = static_cast<uint32_t>(p.heads), tokens = static_cast<uint32_t>(p.tokens);
    const uint32_t at = static_cast<uint32_t>(i), above = at / heads;
    return {above / tokens, above % tokens, at % heads};
  }
  const int64_t above = i / p.heads;
  return {above / p.tokens, above % p.tokens, i % p.heads};
}

// T: Float32, Float16, Bfloat16. blockDim: (threads of a row, rows).
template <class T, int kVector> __global__ void __launch_bounds__(kThreads)
    merge_kernel(const __grid_constant__ MergeParams p) {
  using Storage = typename T::Storage;
  using Chunk = Vector<Storage, kVector>;
  const int64_t row_count = p.batch * p.tokens * p.heads;
  for (int64_t i = int64_t{blockIdx.x} * blockDim.y + threadIdx.y; i < row_count;
       i += int64_t{gridDim.x} * blockDim.y) {
    const Row row = row_of(p, i);
    const Storage* outs = static_cast<const Storage*>(p.outs) + row.batch * p.outs_stride[1] +
                          row.token * p.outs_stride[2] + row.head * p.outs_stride[3];
    const float* lses =
        p.lses + row.batch * p.lses_stride[1] + row.head * p.lses_stride[2] + row.token * p.lses_stride[3];
    Storage* out = static_cast<Storage*>(p.out) + i * p.head_dim;

    int64_t live = 0, lone = 0;  // partials that count; the last of them
    SoftmaxState<Natural> state;
    for (int64_t k = 0; k < p.partials; ++k) {
      const float lse = __ldg(lses + k * p.lses_stride[0]);
      if (lse == -kInf) continue;
      merge(state, SoftmaxState<Natural>{lse, 1});
      lone = k;
      ++live;
    }
    // A lone partial is copied bit for bit. But a NaN lse says that the row is NaN, whatever stands in it.
    const float lse = live == 0 ? -kInf : live == 1 ? state.max : state.lse();
    const bool copy = live == 1 && lse == lse;
    if (threadIdx.x == 0) p.lse[(row.batch * p.heads + row.head) * p.tokens + row.token] = lse;

    for (int64_t d = int64_t{threadIdx.x} * kVector; d < p.head_dim; d += int64_t{blockDim.x} * kVector) {
      Chunk result;
      if (copy) {
        result = *reinterpret_cast<const Chunk*>(outs + lone * p.outs_stride[0] + d);
      } else {
        float o[kVector] = {};
        SoftmaxState<Natural> seen;
#pragma unroll 4
        for (int64_t k = 0; k < p.partials; ++k) {
          // Loaded before the lse is looked at, so that several partials are in flight.
          const Chunk part = *reinterpret_cast<const Chunk*>(outs + k * p.outs_stride[0] + d);
          const float part_lse = __ldg(lses + k * p.lses_stride[0]);
          if (part_lse == -kInf) continue;
          const bool first = seen.empty();
          const MergeWeights weight = merge(seen, SoftmaxState<Natural>{part_lse, 1});
          for (int v = 0; v < kVector; ++v) {
            const float x = T::load(part.value[v]);
            o[v] = first ? x : o[v] * weight.a + x * weight.b;
          }
        }
        const float scale = live == 0 ? 0 : live == 1 ? lse : 1 / seen.sum;  // live == 1: the lse is NaN
        for (int v = 0; v < kVector; ++v) result.value[v] = T::store(o[v] * scale);
      }
      *reinterpret_cast<Chunk*>(out + d) = result;
    }
  }
}

// Whether every row of every partial starts at a multiple of `bytes`, a multiple of the element's size.
bool aligned(const MergeParams& p, int64_t element, int64_t bytes) {
  uintptr_t all = reinterpret_cast<uintptr_t>(p.outs) | reinterpret_cast<uintptr_t>(p.out);
  for (const int64_t stride : p.outs_stride) all |= static_cast<uintptr_t>(stride * element);
  all |= static_cast<uintptr_t>(p.head_dim * element);
  return all % static_cast<uintptr_t>(bytes) == 0;
}

template <class T, int kVector> void launch_merge(const MergeParams& p, cudaStream_t stream) {
  const int64_t rows = p.batch * p.tokens * p.heads, chunks = ceil_div(p.head_dim, kVector);
  unsigned row_threads = 1;
  while (row_threads < kMaxRowThreads && row_threads < chunks) row_threads *= 2;
  const dim3 block(row_threads, kThreads / row_threads);
  const auto grid = static_cast<unsigned>(min_of<int64_t>(ceil_div(rows, block.y), INT32_MAX));
  merge_kernel<T, kVector><<<grid, block, 0, stream>>>(p);
}

template <class T> void launch_merge(const MergeParams& p, cudaStream_t stream) {
  constexpr int kElement = sizeof(typename T::Storage);
  if (aligned(p, kElement, kVectorBytes)) {
    launch_merge<T, kVectorBytes / kElement>(p, stream);
  } else {
    launch_merge<T, 1>(p, stream);
  }
}

}  // namespace

Status merge_states(const MergeParams& p, const Launch& launch) {
  if (const Status status = enter(launch); !status.ok()) return status;
  if (p.batch * p.tokens * p.heads == 0) return {};
  const auto stream = static_cast<cudaStream_t>(launch.stream);
  switch (p.dtype) {
    case Dtype::kFloat32:
      launch_merge<Float32>(p, stream);
      break;
    case Dtype::kFloat16:
      launch_merge<Float16>(p, stream);
      break;
    case Dtype::kBfloat16:
      launch_merge<Bfloat16>(p, stream);
      break;
  }
  return launch_status();
}

}  // namespace flashq::cuda
