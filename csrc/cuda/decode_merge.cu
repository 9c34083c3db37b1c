// The second kernel of split-KV attention: the partial results of each item that was split, merged in split order.
//
// It makes the plan once more, from the lengths, so the first kernel leaves nothing but partial results; on compute
// capability 9.0 and newer it does so while that kernel still runs. Groups of threads fold runs of neighbouring
// partials of a row, and the first group folds the groups' results: which run a partial belongs to depends on their
// number alone.
#include <algorithm>
#include <atomic>
#include <type_traits>

#include "cuda/decode/merge_partials.h"
#include "cuda/decode/merge_rows.cuh"
#include "cuda/decode/partial_list.cuh"
#include "cuda/decode/plan_table.cuh"
#include "cuda/launch.h"
#include "cuda/ptx/dependent_launch.cuh"

namespace flashq::cuda {
namespace {

constexpr int kMergeThreads = 128;
constexpr int kBlocksOfSm = 8;  // run at once, where there is a table
constexpr int kBatch = 4;       // partials in flight of a thread
constexpr int kMaxGroups = 32, kMostLanes = 32;
constexpr int kFixedGroups = 8, kFixedLanes = 16;  // with kv_chunk: a row's bits must not depend on its batch mates

// How the work is divided. A job is four times `lanes` neighbouring columns of an item's rows, for `groups` times
// `lanes` threads: powers of two, and whole warps together.
struct MergeShape {
  int lanes, groups;
  int jobs;           // of all items; where there is no table, of one, that of blockIdx.x
  Divisor item_jobs;  // of an item

  // `columns`: of an item, four at a time; `table`: whether PlanTable finds the items.
  MergeShape(int64_t items, int64_t columns, int groups, int most_lanes, bool table)
      : lanes(static_cast<int>(min_of<int64_t>(most_lanes, kMergeThreads / groups))),
        groups(groups),
        jobs(static_cast<int>(ceil_div(columns, lanes) * (table ? items : 1))),
        item_jobs(ceil_div(columns, lanes)) {}

  int64_t blocks() const { return ceil_div(jobs, kMergeThreads / (lanes * groups)); }
};

// kTable: PlanTable finds the items. `merged`: the shape where CTAs have merged results of their workers; else `alone`.
template <bool kTable> __global__ void __launch_bounds__(kMergeThreads, kTable ? kBlocksOfSm : 6)
    merge_partials_kernel(const __grid_constant__ AttentionParams p, const __grid_constant__ SplitConfig split,
                          const Partials partials, const __grid_constant__ AlikeRule alike,
                          const __grid_constant__ MergeShape alone, const __grid_constant__ MergeShape merged) {
  ptx::allow_dependents();
  __shared__ RowPart parts[kMergeThreads];
  const auto thread = static_cast<int>(threadIdx.x);
  const auto block = static_cast<int>(kTable ? blockIdx.x : blockIdx.y);
  const auto blocks = static_cast<int>(kTable ? gridDim.x : gridDim.y);
  Segment segment{};
  Division division{};
  __shared__ std::conditional_t<kTable, PlanTable, char> table;
  if constexpr (kTable)
    division = table.build(p, split, alike);
  else
    segment = plan_item(p, split, static_cast<int>(blockIdx.x), division.total);
  // A kernel must not end before the one before it, but one block that waits is enough. The others make room for the
  // next call at once where they have nothing to do.
  bool waits = true;
  const bool first_block = blockIdx.x == 0 && blockIdx.y == 0;
  if (division.complete() && !first_block) return;
  const MergeShape& shape = division.merged > 0 ? merged : alone;
  const int lanes = shape.lanes, groups = shape.groups, job_threads = lanes * groups;
  const int job_group = divide_down(thread, lanes), lane = thread - job_group * lanes;
  const int group = job_group & (groups - 1), quarter = static_cast<int>(p.query.head_dim) / 4;
  const int block_jobs = divide_down(kMergeThreads, job_threads), own_job = divide_down(thread, job_threads);
  const int slot_floats = partials.block_rows * partials.head_dim;
  const int jobs = division.complete() ? 0 : shape.jobs;
#pragma unroll 1
  for (int base = block * block_jobs; base < jobs; base += blocks * block_jobs) {
    int slice = base + own_job, number = 0;
    if constexpr (kTable) {
      number = shape.item_jobs.quotient(slice);
      segment = {};
      if (slice < jobs) segment = table.item(p, split, number);
      slice -= number * static_cast<int>(shape.item_jobs.value);
    }
    const PartialList list = PlanTable::find_partials(split, division, segment, number);
    const ItemRows item(p, split, segment);
    const int columns = list.count > 1 ? item.rows * quarter : 0, run = divide_down(list.count + groups - 1, groups);
    if (!__syncthreads_or(columns)) continue;
    const int column = min_of(slice * lanes + lane, columns - 1), row = divide_down(column, quarter);
    const int d = (column - row * quarter) * 4;
    if (waits) ptx::wait_for_primary();
    waits = false;
    RowPart sum;
    const int end = columns > 0 ? min_of(list.count, (group + 1) * run) : 0;
    const SoftmaxState<Binary>* const states = &partials.state(0, row);
    const float* const values = partials.row(0, row) + d;
#pragma unroll 1
    for (int k = group * run; k < end; k += kBatch) {
      RowPart part[kBatch];
#pragma unroll
      for (int j = 0; j < kBatch; ++j) {
        if (k + j >= end) continue;
        const int slot = k + j == 0 ? list.first : list.next + (k + j - 1) * list.step;
        part[j].state = states[int64_t{slot} * partials.block_rows];
        part[j].o = *reinterpret_cast<const float4*>(values + int64_t{slot} * slot_floats);
      }
#pragma unroll
      for (int j = 0; j < kBatch; ++j) sum.merge_with(part[j]);
    }
    // A tree over the groups: neighbours first.
#pragma unroll 1
    for (int step = 1; step < groups; step *= 2) {
      parts[thread] = sum;
      __syncthreads();
      if ((group & (2 * step - 1)) == 0) sum.merge_with(parts[thread + step * lanes]);
      __syncthreads();
    }
    if (group == 0 && slice * lanes + lane < columns) finish_part(p, split, segment, item, row, d, sum);
  }
  if (waits && first_block) ptx::wait_for_primary();
}

}  // namespace

bool runs_code_of_90(int32_t device) {
  enum : int8_t { kUnknown, kNo, kYes };
  static std::atomic<int8_t> known[64];
  std::atomic<int8_t> none{kUnknown}, &answer = device < 64 ? known[device] : none;
  if (answer.load(std::memory_order_relaxed) == kUnknown) {
    cudaFuncAttributes attributes{};
    const bool yes = !cudaFuncGetAttributes(&attributes, merge_partials_kernel<true>) && attributes.ptxVersion >= 90;
    answer.store(yes ? kYes : kNo, std::memory_order_relaxed);
  }
  return answer.load(std::memory_order_relaxed) == kYes;
}

void launch_merge_partials(const AttentionParams& p, const SplitConfig& split, const AlikeRule& alike,
                           const Partials& partials, const Launch& launch) {
  const int64_t items = count_row_tiles(p.query, split.block_rows.value) * p.query.kv_heads;
  const int64_t tokens = p.query.cu_seqlens_q.given() ? p.query.total_tokens : p.query.q_len;
  const int64_t rows = min_of<int64_t>(tokens * split.group.value, split.block_rows.value);
  const int64_t columns = rows * (p.query.head_dim / 4);
  int sm_count = 1;
  if (Device device{}; describe_device(launch.device, device).ok()) sm_count = device.sm_count;
  const int64_t wave = int64_t{kBlocksOfSm} * sm_count * kMergeThreads;  // threads that run at once
  const bool table = PlanTable::holds(p);
  // With 64 rows items have columns enough, and fewer groups are faster (63 query heads on 8 x 65536: 1 %).
  const int64_t most_threads = split.block_rows.value == 64 ? wave / 2 : wave;
  const auto shape_for = [&](int64_t most_partials) {
    int groups = 1;
    while (groups < kMaxGroups && groups * kBatch <= most_partials && items * columns * groups * 2 <= most_threads)
      groups *= 2;
    if (split.unit_is_split) groups = kFixedGroups;
    return MergeShape(items, columns, groups, split.unit_is_split ? kFixedLanes : kMostLanes, table);
  };
  // As many groups as there are threads to spare, because an item may have far more partials than the others; but not
  // where items are alike.
  const MergeShape alone = shape_for(split.workers), merged = shape_for(split.workers / alike.cta_workers / items);
  const auto blocks = static_cast<unsigned>(std::max(alone.blocks(), merged.blocks()));
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = table ? dim3(static_cast<unsigned>(min_of<int64_t>(blocks, wave / kMergeThreads)))
                         : dim3(static_cast<unsigned>(items), blocks);
  config.blockDim = dim3(kMergeThreads);
  config.stream = static_cast<cudaStream_t>(launch.stream);
  config.attrs = &attribute;
  config.numAttrs = runs_code_of_90(launch.device) ? 1 : 0;
  cudaLaunchKernelEx(&config, table ? merge_partials_kernel<true> : merge_partials_kernel<false>, p, split, partials,
                     alike, alone, merged);  // launch_status() reports a failure
}

}  // namespace flashq::cuda
