// The second kernel of split-KV attention: the partial results of each item that was split, merged in split order.
//
// A block merges one row: kGroups groups of threads fold runs of neighbouring partials, and the first group folds the
// groups' results, so the order is that of the splits. Which run a partial belongs to depends on their number alone.
#include <atomic>

#include "cuda/decode/finish.cuh"
#include "cuda/decode/merge_partials.h"
#include "cuda/ptx/dependent_launch.cuh"

namespace flashq::cuda {
namespace {

constexpr int kGroups = 4;
constexpr int kMaxLanes = 64;  // of 4 columns: head_dim 256
constexpr int kBatch = 5;      // partials in flight
constexpr int64_t kMaxRowBlocks = 16;

// blockDim (lanes: 4 columns each, kGroups), gridDim (CTAs of the first kernel, rows).
__global__ void __launch_bounds__(kMaxLanes* kGroups)
    merge_partials_kernel(const __grid_constant__ AttentionParams p, const Partials partials) {
  __shared__ float4 sums[kGroups][kMaxLanes];
  __shared__ SoftmaxState<Binary> states[kGroups];
  const int d = static_cast<int>(threadIdx.x) * 4;
  const int group = static_cast<int>(threadIdx.y), group_size = static_cast<int>(p.query.q_heads / p.query.kv_heads);
  ptx::wait_for_primary();
  const ItemList list = partials.lists[blockIdx.x];
  for (int i = 0; i < list.count; ++i) {
    const SplitItem item = i == 0 ? list.first : partials.items[list.more + i];
    const int run = (item.count + kGroups - 1) / kGroups, begin = group * run, end = min_of(item.count, begin + run);
    for (int row = static_cast<int>(blockIdx.y); row < item.rows; row += static_cast<int>(gridDim.y)) {
      SoftmaxState<Binary> state;
      float4 o{};
      for (int k = begin; k < end; k += kBatch) {
        SoftmaxState<Binary> part[kBatch];
        float4 part_o[kBatch];
#pragma unroll
        for (int j = 0; j < kBatch; ++j) {
          if (k + j >= end) continue;
          const int slot = k + j == 0 ? item.first : item.next + (k + j - 1) * item.step;
          part[j] = partials.state(slot, row);
          part_o[j] = *reinterpret_cast<const float4*>(partials.row(slot, row) + d);
        }
#pragma unroll
        for (int j = 0; j < kBatch; ++j)
          if (k + j < end) merge_values(state, o, part[j], part_o[j]);
      }
      __syncthreads();  // the row before has been read
      sums[group][threadIdx.x] = o;
      if (threadIdx.x == 0) states[group] = state;
      __syncthreads();
      if (group != 0) continue;
      for (int other = 1; other < kGroups; ++other) merge_values(state, o, states[other], sums[other][threadIdx.x]);
      const int query = (item.first_row + row) / group_size, head = (item.first_row + row) % group_size;
      finish_values(p, item.batch, item.token + query, item.kv_head * group_size + head, d, state, o);
    }
  }
}

// Whether a device runs code that waits for the kernel before it: that of 9.0 does, PTX of 8.0 on a newer GPU does not.
bool can_overlap(int32_t device) {
  enum : int8_t { kUnknown, kNo, kYes };
  static std::atomic<int8_t> known[64];
  std::atomic<int8_t> none{kUnknown}, &answer = device < 64 ? known[device] : none;
  if (answer.load(std::memory_order_relaxed) == kUnknown) {
    cudaFuncAttributes attributes{};
    const bool yes = !cudaFuncGetAttributes(&attributes, merge_partials_kernel) && attributes.ptxVersion >= 90;
    answer.store(yes ? kYes : kNo, std::memory_order_relaxed);
  }
  return answer.load(std::memory_order_relaxed) == kYes;
}

}  // namespace

void launch_merge_partials(const AttentionParams& p, const Partials& partials, int64_t ctas, int64_t rows,
                           const Launch& launch) {
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(ctas), static_cast<unsigned>(min_of(rows, kMaxRowBlocks)));
  config.blockDim = dim3(static_cast<unsigned>(p.query.head_dim / 4), kGroups);
  config.stream = static_cast<cudaStream_t>(launch.stream);
  config.attrs = &attribute;
  config.numAttrs = can_overlap(launch.device) ? 1 : 0;
  cudaLaunchKernelEx(&config, merge_partials_kernel, p, partials);  // launch_status() reports a failure
}

}  // namespace flashq::cuda
