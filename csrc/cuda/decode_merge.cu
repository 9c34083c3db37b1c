// The second kernel of split-KV attention: the partial results of each item that was split, merged in split order.
//
// It makes the plan once more, from the lengths, so the first kernel leaves nothing but partial results; on compute
// capability 9.0 and newer it does so while that kernel still runs. Groups of threads fold runs of neighbouring
// partials of a row, and the first group folds the groups' results: which run a partial belongs to depends on their
// number alone.
#include <atomic>

#include "cuda/decode/merge_partials.h"
#include "cuda/decode/merge_rows.cuh"
#include "cuda/decode/partial_list.cuh"
#include "cuda/ptx/dependent_launch.cuh"

namespace flashq::cuda {
namespace {

constexpr int kMergeThreads = 512;
constexpr int kMaxGroups = 16;
constexpr int kBatch = 5;  // partials in flight of a thread
constexpr int64_t kMaxRowBlocks = 64;

// gridDim (items at most, row blocks). A group is a thread for each four columns; there is a power of two of them.
__global__ void __launch_bounds__(kMergeThreads)
    merge_partials_kernel(const __grid_constant__ AttentionParams p, const __grid_constant__ SplitConfig split,
                          const Partials partials, const int groups) {
  __shared__ RowPart parts[kMergeThreads];
  int total = 0;
  const Segment segment = plan_item(p, split, static_cast<int>(blockIdx.x), total);
  const PartialList list = find_partials(split, segment, total);
  if (list.count <= 1) {
    ptx::wait_for_primary();  // or this kernel might end before the one before it
    return;
  }
  const ItemRows item(p, split, segment);
  const int lanes = static_cast<int>(p.query.head_dim) / 4;
  const int group = divide_down(static_cast<int>(threadIdx.x), lanes);  // the last warp may have threads of none
  const int lane = static_cast<int>(threadIdx.x) - group * lanes, d = lane * 4;
  const int run = divide_down(list.count + groups - 1, groups), begin = group * run;
  const int end = group < groups ? min_of(list.count, begin + run) : 0;
  ptx::wait_for_primary();
#pragma unroll 1
  for (int row = static_cast<int>(blockIdx.y); row < item.rows; row += static_cast<int>(gridDim.y)) {
    RowPart sum;
#pragma unroll 1
    for (int k = begin; k < end; k += kBatch) {
      RowPart part[kBatch];
#pragma unroll
      for (int j = 0; j < kBatch; ++j) {
        if (k + j >= end) continue;
        const int slot = k + j == 0 ? list.first : list.next + (k + j - 1) * list.step;
        part[j].state = partials.state(slot, row);
        part[j].o = *reinterpret_cast<const float4*>(partials.row(slot, row) + d);
      }
#pragma unroll
      for (int j = 0; j < kBatch; ++j) sum.merge_with(part[j]);
    }
    // A tree over the groups, a power of two of them: neighbours first.
#pragma unroll 1
    for (int step = 1; step < groups; step *= 2) {
      parts[threadIdx.x] = sum;
      __syncthreads();
      if (group < groups && (group & (2 * step - 1)) == 0)
        sum.merge_with(parts[static_cast<int>(threadIdx.x) + step * lanes]);
      __syncthreads();
    }
    if (group != 0) continue;
    finish_part(p, split, segment, item, row, d, sum);
  }
}

}  // namespace

bool runs_code_of_90(int32_t device) {
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

void launch_merge_partials(const AttentionParams& p, const SplitConfig& split, const Partials& partials,
                           const Launch& launch) {
  const int64_t items = count_row_tiles(p.query, split.block_rows.value) * p.query.kv_heads;
  const int64_t tokens = p.query.cu_seqlens_q.given() ? p.query.total_tokens : p.query.q_len;
  const int64_t rows = min_of<int64_t>(tokens * split.group.value, split.block_rows.value);
  // Of the mean number of partials of an item, not that of the longest one.
  const int64_t most = split.unit_is_split ? kMaxGroups : ceil_div(split.workers, items);
  const int64_t lanes = p.query.head_dim / 4;
  int64_t groups = 1;
  while (groups < kMaxGroups && groups * 2 <= most && groups * 2 * lanes <= kMergeThreads) groups *= 2;
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(items), static_cast<unsigned>(min_of(rows, kMaxRowBlocks)));
  config.blockDim = dim3(static_cast<unsigned>(round_up(lanes * groups, 32)));
  config.stream = static_cast<cudaStream_t>(launch.stream);
  config.attrs = &attribute;
  config.numAttrs = runs_code_of_90(launch.device) ? 1 : 0;
  cudaLaunchKernelEx(&config, merge_partials_kernel, p, split, partials,
                     static_cast<int>(groups));  // launch_status() reports a failure
}

}  // namespace flashq::cuda
