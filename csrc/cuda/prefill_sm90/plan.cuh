// The planner of packed sequences and of caches: a block that reads offsets and lengths on the device and writes a
// Plan.
#pragma once
#include <cub/block/block_radix_sort.cuh>
#include <cub/block/block_scan.cuh>

#include "cuda/prefill_sm90/traits.cuh"
#include "cuda/ptx/dependent_launch.cuh"
#include "cuda/sequences.cuh"

namespace flashq::cuda::sm90 {

inline constexpr int kPlanThreads = 256, kPlanItems = 2, kPlanChunk = kPlanThreads * kPlanItems;

// Sequences [0, batch) and, of packed queries, as number `batch` the rows past the last one. Each chunk of 512 is
// sorted by falling length, so that the tiles drawn last are short; more sequences than that are evened out by their
// number.
static __global__ void __launch_bounds__(kPlanThreads)
    plan_prefill(const __grid_constant__ Attention16Params p, int pack_log2, int head_packs, int tile_q) {
  ptx::allow_dependents();
  const auto plan = static_cast<Plan*>(p.scratch);
  const IndexView &cu_q = p.query.cu_seqlens_q, &cu_k = p.kv.cu_seqlens_k;
  const int batch = static_cast<int>(p.query.batch), count = batch + cu_q.given();
  const int total_q = static_cast<int>(p.query.total_tokens), total_k = static_cast<int>(p.kv.page_size);
  using Scan = cub::BlockScan<int, kPlanThreads>;
  using Sort = cub::BlockRadixSort<uint32_t, kPlanThreads, kPlanItems, int>;
  __shared__ union {
    typename Scan::TempStorage scan;
    typename Sort::TempStorage sort;
  } temp;
  __shared__ PlannedSequence unsorted[kPlanChunk];
  int q_before = 0, k_before = 0, tiles_before = 0;  // of earlier chunks
  const auto larger = [](int a, int b) { return max(a, b); };
  for (int base = 0; base < count; base += kPlanChunk) {
    const int mine = base + static_cast<int>(threadIdx.x) * kPlanItems;
    int q_end[kPlanItems], k_end[kPlanItems], q_most, k_most;
    for (int i = 0; i < kPlanItems; ++i) {
      const bool real = mine + i < batch && cu_q.given();
      q_end[i] = real ? static_cast<int>(min(max(cu_q(mine + i + 1), int64_t{q_before}), int64_t{total_q})) : total_q;
      k_end[i] = real && cu_k.given()
                     ? static_cast<int>(min(max(cu_k(mine + i + 1), int64_t{k_before}), int64_t{total_k}))
                     : 0;
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
      PlannedSequence x{.q_begin = q_begin, .q_len = q_end[i] - q_begin, .k_begin = k_begin, .kv_len = -1};
      if (b < batch) {
        if (!cu_q.given()) {
          x.batch = x.sequence = b;
          x.q_begin = 0;
          x.q_len = static_cast<int>(p.query.q_len);
        }
        x.kv_len = max(k_end[i] - k_begin, 0);
        if (!cu_k.given()) {
          x.sequence = b;
          x.k_begin = 0;
          x.kv_len = static_cast<int>(clamp(p.seqlens(b), 0, kv_capacity(p.kv)));
        }
        if (p.kv_start.given()) x.kv_start = static_cast<int>(clamp(p.kv_start(b), 0, x.kv_len));
      } else if (b >= count) {
        x.q_len = 0;
      }
      unsorted[at] = x;
      key[i] = static_cast<uint32_t>(x.kv_len + 1);
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
      if (mine + i < count) plan->sequence[mine + i] = s;
    }
    q_before = max(q_before, q_most);
    k_before = max(k_before, k_most);
    tiles_before += sum;
    __syncthreads();
  }
  if (threadIdx.x == 0) {
    plan->drawn = 0;
    plan->sequences = count;
    plan->tiles = tiles_before;
  }
}

}  // namespace flashq::cuda::sm90
