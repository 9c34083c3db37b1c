// The second kernel of tbq4_attention: the partial results of each item, merged in split order and rotated back, and
// then those of the exact pool's keys, which were never rotated.
//
// As in decode_merge.cu the plan is made once more from the lengths, and groups of threads fold runs of neighbouring
// partials of a row; which run a partial belongs to depends on their number alone. A group is as many threads as a
// block has fours of columns, so rotating is a matter of neighbouring lanes.
#include "cuda/decode/merge_rows.cuh"
#include "cuda/decode/partial_list.cuh"
#include "cuda/ptx/dependent_launch.cuh"
#include "cuda/tbq4_attention/merge.h"
#include "cuda/tbq4_attention/rotation.cuh"
#include "cuda/tbq4_attention/slots.cuh"
#include "cuda/tbq4_attention/tile.cuh"

namespace flashq::cuda {
namespace {

constexpr int kMostThreads = 512;  // of a block
// Partials in flight of a thread: fewer, with half as many registers, where blocks would otherwise not all run at once,
// because a second wave of blocks takes longer than a second batch. More than nine gain nothing.
constexpr int kDeepBatch = 9, kShallowBatch = 5;
constexpr int64_t kRun = 8;          // partials of a group: with more of them, more groups share a row
constexpr int64_t kChunkGroups = 8;  // with kv_chunk: a row's bits must not depend on its batch mates
constexpr int64_t kMaxRowBlocks = 64;

// Items that one worker has whole have a slot too.
__device__ __forceinline__ PartialList find_codes(const CodeParams& p, const Segment& segment, int total) {
  PartialList list = find_partials(p.split, segment, total);
  if (list.count == 1 && !p.split.unit_is_split) list.first = slot_of_whole(p.call, p.split, segment);
  return list;
}

// The partials [begin, end) of a row's list, four columns from d on.
template <int kBatch> __device__ __forceinline__ RowPart fold_partials(const Partials& partials,
                                                                       const PartialList& list, int begin, int end,
                                                                       int row, int d) {
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
    float top = sum.state.max;
#pragma unroll
    for (int j = 0; j < kBatch; ++j) top = fmaxf(top, part[j].state.max);
    const float shrink = merge_weight(sum.state, top);
    sum.state = {top, sum.state.sum * shrink};
    sum.o = {sum.o.x * shrink, sum.o.y * shrink, sum.o.z * shrink, sum.o.w * shrink};
#pragma unroll
    for (int j = 0; j < kBatch; ++j) {
      if (part[j].state.empty()) continue;  // whatever its sums hold
      const float weight = merge_weight(part[j].state, top);
      const float4 o = part[j].o;
      sum.state.sum = fmaf(weight, part[j].state.sum, sum.state.sum);
      sum.o = {fmaf(weight, o.x, sum.o.x), fmaf(weight, o.y, sum.o.y), fmaf(weight, o.z, sum.o.z),
               fmaf(weight, o.w, sum.o.w)};
    }
  }
  return sum;
}

// gridDim (items at most, row blocks, blocks of a row). `groups` work on a row, a power of two of them; a block has
// those of several rows.
template <int D, int kBatch> __global__ void __launch_bounds__(kMostThreads, kBatch == kDeepBatch ? 1 : 2)
    merge_codes_kernel(const __grid_constant__ CodeParams p, const int groups) {
  constexpr int kWidth = CodeTile<D>::kWidth, kLanes = kWidth / 4;
  __shared__ RowPart parts[kMostThreads];
  ptx::allow_dependents();
  int total = 0;
  const Segment segment = plan_item(p.call, p.split, static_cast<int>(blockIdx.x), total);
  const PartialList list = find_codes(p, segment, total);
  if (list.count == 0) {
    ptx::wait_for_primary();  // or this kernel might end before the one before it
    return;
  }
  const ItemRows item(p.call, p.split, segment);
  const int at = static_cast<int>(threadIdx.x) / kLanes, group = at & (groups - 1);
  const int rows = divide_down(static_cast<int>(blockDim.x), kLanes * groups), own = divide_down(at, groups);
  const int d = static_cast<int>(blockIdx.z) * kWidth + static_cast<int>(threadIdx.x) % kLanes * 4;
  const int run = divide_down(list.count + groups - 1, groups), begin = group * run;
  bool waited = false;
#pragma unroll 1
  for (int first = static_cast<int>(blockIdx.y) * rows; first < item.rows;
       first += static_cast<int>(gridDim.y) * rows) {
    const int row = min_of(first + own, item.rows - 1);
    if (!waited) ptx::wait_for_primary();
    waited = true;
    RowPart sum = fold_partials<kBatch>(p.partials, list, begin, min_of(list.count, begin + run), row, d);
    RowPart exact;
    if (p.exact && group == 0) {
#pragma unroll 1
      for (int part = 0; part < p.exact_parts; ++part) {
        const int slot = slot_of_exact(p, static_cast<int>(blockIdx.x), part);
        exact.merge_with(
            {p.partials.state(slot, row), *reinterpret_cast<const float4*>(p.partials.row(slot, row) + d)});
      }
    }
    // A tree over the groups of a row: neighbours first.
#pragma unroll 1
    for (int step = 1; step < groups; step *= 2) {
      __syncthreads();
      parts[threadIdx.x] = sum;
      __syncthreads();
      if ((group & (2 * step - 1)) == 0) sum.merge_with(parts[static_cast<int>(threadIdx.x) + step * kLanes]);
    }
    rotate_fours<kWidth, true>(sum.o);
    sum.merge_with(exact);
    if (group == 0 && first + own < item.rows) finish_part(p.call, p.split, segment, item, row, d, sum);
  }
  if (!waited) ptx::wait_for_primary();
}

template <int D> void launch_merge(const CodeParams& p, const Device& device, const Launch& launch) {
  constexpr int64_t kLanes = CodeTile<D>::kWidth / 4;
  const int64_t items = most_items(p.call.query, p.split.block_rows.value);
  constexpr int64_t most = kMostThreads / kLanes;  // groups of a block
  // Of the mean number of partials of an item, not that of the longest one.
  const int64_t partials = p.split.unit_is_split ? 1 : ceil_div(p.split.workers, items) + 1;
  int64_t groups = 1;
  while (groups < most && groups * kRun < partials) groups *= 2;
  if (p.call.kv_chunk > 0) groups = kChunkGroups;
  const int64_t rows = clamp(most / groups, 1, p.rows);
  const int64_t threads = round_up(rows * groups * kLanes, 32);
  const dim3 grid(static_cast<unsigned>(items), static_cast<unsigned>(min_of(ceil_div(p.rows, rows), kMaxRowBlocks)),
                  static_cast<unsigned>(CodeTile<D>::kBlocks));
  // With kv_chunk the same for every batch: where a batch of partials ends is in a row's bits.
  const bool deep = p.call.kv_chunk > 0 || items * grid.y * grid.z <= device.sm_count * (kMostThreads / threads);
  launch_overlapping(deep ? merge_codes_kernel<D, kDeepBatch> : merge_codes_kernel<D, kShallowBatch>, grid,
                     static_cast<int>(threads), 0, device, launch, p, static_cast<int>(groups));
}

}  // namespace

void launch_merge_codes(const CodeParams& p, const Device& device, const Launch& launch) {
  if (p.call.query.head_dim == 64)
    launch_merge<64>(p, device, launch);
  else if (p.call.query.head_dim == 128)
    launch_merge<128>(p, device, launch);
  else
    launch_merge<256>(p, device, launch);
}

}  // namespace flashq::cuda
