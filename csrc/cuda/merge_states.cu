// merge_states: partial attention results over disjoint keys to the result over all of them.
//
// Bound by memory: it reads K * head_dim values a row and writes head_dim. A thread owns two 16-byte vectors of a row
// (two values where strides or bases rule vectors out) and walks the partials in order by itself: neighbours read
// neighbouring vectors, the weights are recomputed by every thread instead of passed around, and nothing is shared.
#include <cuda_runtime_api.h>

#include "core/half.h"
#include "core/softmax_state.h"
#include "cuda/kernels.h"
#include "cuda/launch.h"
#include "cuda/vector.cuh"

namespace flashq::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kMaxRowThreads = 64;  // threads side by side in a row; wider rows are walked

struct Row { int64_t batch, token, head; };

__device__ Row row_of(const MergeParams& p, int64_t i) {
  const Quotient head = divide(i, p.heads), token = divide(head.quotient, p.tokens);
  return {token.quotient, token.remainder, head.remainder};
}

// T: Float32, Float16, Bfloat16. blockDim: (threads of a row, rows).
template <class T, int kVector, int kPieces, int kBatch> __global__ void __launch_bounds__(kThreads)
    merge_kernel(const __grid_constant__ MergeParams p) {
  using Storage = typename T::Storage;
  using Chunk = Packed<T, kVector>;
  const int64_t row_count = p.batch * p.tokens * p.heads;
  for (int64_t i = int64_t{blockIdx.x} * blockDim.y + threadIdx.y; i < row_count;
       i += int64_t{gridDim.x} * blockDim.y) {
    const Row row = row_of(p, i);
    const Storage* outs = static_cast<const Storage*>(p.outs) + row.batch * p.outs_stride[1] +
                          row.token * p.outs_stride[2] + row.head * p.outs_stride[3];
    const float* lses =
        p.lses + row.batch * p.lses_stride[1] + row.head * p.lses_stride[2] + row.token * p.lses_stride[3];
    Storage* out = static_cast<Storage*>(p.out) + i * p.head_dim;

    float merged_lse;
    int64_t d = int64_t{threadIdx.x} * kVector;
    const int64_t step = int64_t{blockDim.x} * kVector;
    do {  // once even for head_dim 0, for the lse
      SoftmaxState<Natural> state;
      int64_t live = 0, lone = 0;  // partials that count; the last of them, and its lse
      float lone_lse = -kInf;
      float o[kPieces][kVector] = {};
      for (int64_t first = 0; first < p.partials; first += kBatch) {
        Chunk part[kBatch][kPieces] = {};
        float lse[kBatch], weight[kBatch];
#pragma unroll
        for (int k = 0; k < kBatch; ++k) {
          const bool there = first + k < p.partials;
          lse[k] = there ? __ldg(lses + (first + k) * p.lses_stride[0]) : -kInf;
#pragma unroll
          for (int j = 0; j < kPieces; ++j)
            if (there && d + j * step < p.head_dim)
              part[k][j] = load<Chunk>(outs + (first + k) * p.outs_stride[0] + d + j * step);
        }
        const SoftmaxState<Natural> batch = merge_all<Natural>(lse, weight);
        if (batch.empty()) continue;
        const MergeWeights scale = merge(state, batch);
        if (first > 0)
#pragma unroll
          for (int j = 0; j < kPieces; ++j)
            for (int v = 0; v < kVector; ++v) o[j][v] *= scale.a;
#pragma unroll
        for (int k = 0; k < kBatch; ++k) {
          if (lse[k] == -kInf) continue;
          lone = first + k;
          lone_lse = lse[k];
          ++live;
#pragma unroll
          for (int j = 0; j < kPieces; ++j)
            for (int v = 0; v < kVector; ++v) o[j][v] += part[k][j].get(v) * (weight[k] * scale.b);
        }
      }
      // A lone partial is copied bit for bit. But a NaN lse says that the row is NaN, whatever stands in it.
      const bool copy = live == 1 && lone_lse == lone_lse;
      merged_lse = copy ? lone_lse : state.lse();
      const float scale = live > 0 ? 1 / state.sum : 0;
#pragma unroll
      for (int j = 0; j < kPieces; ++j) {
        if (d + j * step >= p.head_dim) continue;
        Chunk result;
        for (int v = 0; v < kVector; ++v) result.set(v, o[j][v] * scale);
        if (copy) result = load<Chunk>(outs + lone * p.outs_stride[0] + d + j * step);
        store(out + d + j * step, result);
      }
      d += kPieces * step;
    } while (d < p.head_dim);
    if (threadIdx.x == 0) p.lse[(row.batch * p.heads + row.head) * p.tokens + row.token] = merged_lse;
  }
}

// Whether every row of every partial can be read and written in vectors of 16 bytes.
bool vectors_fit(const MergeParams& p, int64_t element) {
  uintptr_t all = reinterpret_cast<uintptr_t>(p.outs) | reinterpret_cast<uintptr_t>(p.out);
  for (const int64_t stride : p.outs_stride) all |= static_cast<uintptr_t>(stride * element);
  return widest_vector(all | static_cast<uintptr_t>(p.head_dim * element)) == kVectorBytes;
}

template <class T, int kVector, int kPieces, int kBatch> void launch_merge(const MergeParams& p, cudaStream_t stream) {
  const int64_t rows = p.batch * p.tokens * p.heads, pieces = ceil_div(p.head_dim, kVector * kPieces);
  unsigned row_threads = 1;
  while (row_threads < kMaxRowThreads && row_threads < pieces) row_threads *= 2;
  const dim3 block(row_threads, kThreads / row_threads);
  const auto grid = static_cast<unsigned>(min_of<int64_t>(ceil_div(rows, block.y), INT32_MAX));
  merge_kernel<T, kVector, kPieces, kBatch><<<grid, block, 0, stream>>>(p);
}

template <class T> void launch_merge(const MergeParams& p, cudaStream_t stream) {
  constexpr int kElement = sizeof(typename T::Storage);
  if (vectors_fit(p, kElement)) {
    launch_merge<T, kVectorBytes / kElement, 2, 4>(p, stream);
  } else {
    launch_merge<T, 1, 2, 4>(p, stream);
  }
}

}  // namespace

Status merge_states(const MergeParams& p, const Launch& launch) {
  if (const Status status = enter(launch); !status.ok()) return status;
  if (p.batch * p.tokens * p.heads == 0) return {};
  const auto stream = static_cast<cudaStream_t>(launch.stream);
  switch (p.dtype) {
    case Dtype::kFloat32: launch_merge<Float32>(p, stream); break;
    case Dtype::kFloat16: launch_merge<Float16>(p, stream); break;
    case Dtype::kBfloat16: launch_merge<Bfloat16>(p, stream); break;
  }
  return launch_status();
}

}  // namespace flashq::cuda
