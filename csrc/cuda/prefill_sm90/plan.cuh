// The planner of packed sequences: a block that reads cu_seqlens on the device and writes a Plan.
#pragma once
#include <cub/block/block_radix_sort.cuh>
#include <cub/block/block_scan.cuh>

#include "cuda/prefill_sm90/traits.cuh"
#include "params.h"

namespace flashq::cuda::sm90 {

inline constexpr int kPlanThreads = 512, kPlanItems = 2, kPlanChunk = kPlanThreads * kPlanItems;

// Sequences [0, batch) and, as number `batch`, the rows past the last one. Each chunk of 1024 is sorted by falling
// length, so that the tiles drawn last are short; more sequences than that are evened out by their number.
static __global__ void __launch_bounds__(kPlanThreads)
    plan_prefill(Plan* plan, IndexView cu_q, IndexView cu_k, int batch, int total_q, int total_k, int pack_log2,
                 int head_packs, int tile_q) {
  using Scan = cub::BlockScan<int, kPlanThreads>;
  using Sort = cub::BlockRadixSort<uint32_t, kPlanThreads, kPlanItems, int>;
  __shared__ union {
    typename Scan::TempStorage scan;
    typename Sort::TempStorage sort;
  } temp;
  __shared__ PlannedSequence unsorted[kPlanChunk];
  int q_before = 0, k_before = 0, tiles_before = 0;  // of earlier chunks
  const auto larger = [](int a, int b) { return max(a, b); };
  for (int base = 0; base <= batch; base += kPlanChunk) {
    const int mine = base + static_cast<int>(threadIdx.x) * kPlanItems;
    int q_end[kPlanItems], k_end[kPlanItems], q_most, k_most;
    for (int i = 0; i < kPlanItems; ++i) {
      const bool real = mine + i < batch;
      q_end[i] = real ? static_cast<int>(min(max(cu_q(mine + i + 1), int64_t{q_before}), int64_t{total_q})) : total_q;
      k_end[i] = real ? static_cast<int>(min(max(cu_k(mine + i + 1), int64_t{k_before}), int64_t{total_k})) : 0;
    }
    const int q_first = q_before, k_first = k_before;
    Scan(temp.scan).InclusiveScan(q_end, q_end, larger, q_most);
    __syncthreads();
    Scan(temp.scan).InclusiveScan(k_end, k_end, larger, k_most);
    __syncthreads();
    // The end of the thread before is where this one begins.
    __shared__ int last_q[kPlanThreads], last_k[kPlanThreads];
    last_q[threadIdx.x] = q_end[kPlanItems - 1];
    last_k[threadIdx.x] = k_end[kPlanItems - 1];
    __syncthreads();
    uint32_t key[kPlanItems];
    int index[kPlanItems], tiles[kPlanItems];
    for (int i = 0; i < kPlanItems; ++i) {
      const int b = mine + i, at = b - base;
      const int q_begin = i > 0 ? q_end[i - 1] : threadIdx.x > 0 ? last_q[threadIdx.x - 1] : q_first;
      const int k_begin = max(k_first, i > 0 ? k_end[i - 1] : threadIdx.x > 0 ? last_k[threadIdx.x - 1] : k_first);
      unsorted[at] = {.first_tile = 0,
                      .batch = 0,
                      .q_begin = q_begin,
                      .q_len = b <= batch ? q_end[i] - q_begin : 0,
                      .k_begin = b < batch ? k_begin : 0,
                      .kv_len = b < batch ? max(k_end[i] - k_begin, 0) : -1};
      key[i] = static_cast<uint32_t>(unsorted[at].kv_len + 1);
      index[i] = at;
    }
    __syncthreads();
    Sort(temp.sort).SortDescending(key, index);
    __syncthreads();
    for (int i = 0; i < kPlanItems; ++i)
      tiles[i] = static_cast<int>(ceil_div(int64_t{unsorted[index[i]].q_len} << pack_log2, tile_q)) * head_packs;
    int sum;
    Scan(temp.scan).ExclusiveSum(tiles, tiles, sum);
    for (int i = 0; i < kPlanItems; ++i) {
      PlannedSequence s = unsorted[index[i]];
      s.first_tile = tiles_before + tiles[i];
      if (mine + i <= batch) plan->sequence[mine + i] = s;
    }
    q_before = max(q_before, q_most);
    k_before = max(k_before, k_most);
    tiles_before += sum;
    __syncthreads();
  }
  if (threadIdx.x == 0) {
    plan->drawn = 0;
    plan->sequences = batch + 1;
    plan->tiles = tiles_before;
  }
}

}  // namespace flashq::cuda::sm90
