// An item that a cluster computes alone: its teams' shares, and the merge of their results in shared memory.
#pragma once
#include "cuda/decode/parked_rows.cuh"
#include "cuda/ptx/cluster.cuh"
#include "cuda/ptx/ldmatrix.cuh"

namespace flashq::cuda {

// The share that one of `shares` teams at most has of the item of a cluster; not given() if it has none.
template <class Params>
__device__ __forceinline__ Segment share_item(const Params& p, int cluster, int share, int shares) {
  const QueryView& q = p.call.query;
  const auto row_blocks = static_cast<int>(p.row_blocks.value);
  const int items = row_blocks * static_cast<int>(q.kv_heads), batch = divide_down(cluster, items);
  Segment s{};
  s.sequence = plan_sequence(p.call, p.split, batch, 0, static_cast<int>(q.q_len));
  s.sequence.row_blocks = row_blocks;  // also where no key is seen
  s.item = cluster - batch * items;
  const int units = s.sequence.units, used = min_of(units, shares);
  if (share >= used) return s;
  const Shares even(units, used);
  s.lo = even.begin(share);
  s.hi = even.begin(share + 1);
  return s;
}

// What a CTA receives from all CTAs of its cluster, itself among them: their sums of its share of an item's columns,
// four at a time. It lies behind the rings, which may be in use yet.
struct ReceivedParts {
  static constexpr int kInboxBytes = 16, kColumnBytes = 16 + int{sizeof(SoftmaxState<Binary>)};

  unsigned char* base;
  int ctas, each;  // of the cluster; columns of a CTA's share

  static FLASHQ_HD int count_bytes(int ctas, int columns) {
    return ctas == 1 ? 0 : kInboxBytes + ctas * ((columns + ctas - 1) / ctas) * kColumnBytes;
  }
  __device__ __forceinline__ ptx::Inbox& inbox() const { return *reinterpret_cast<ptx::Inbox*>(base); }
  __device__ __forceinline__ float4& values(int rank, int column) const {
    return reinterpret_cast<float4*>(base + kInboxBytes)[rank * each + column];
  }
  __device__ __forceinline__ SoftmaxState<Binary>& state(int rank, int column) const {
    return reinterpret_cast<SoftmaxState<Binary>*>(base + kInboxBytes + ctas * each * 16)[rank * each + column];
  }
};

// Merges the parked results of a cluster and writes out and lse; all of its threads call it, after
// ptx::greet_cluster() if there are several CTAs. `parked` are this CTA's, of `teams` teams.
template <int kDim>
__device__ __forceinline__ void merge_cluster(const DecodeParams& p, const Segment& segment, const ItemRows& item,
                                              const ParkedRows<kDim>& parked, unsigned char* received, int teams,
                                              int rank) {
  const int ctas = p.cluster_ctas, quarter = static_cast<int>(p.call.query.head_dim) / 4, columns = item.rows * quarter;
  const auto thread = static_cast<int>(threadIdx.x), threads = static_cast<int>(blockDim.x);
  const ReceivedParts parts{received, ctas, (columns + ctas - 1) >> p.cluster_shift};
  const auto for_columns = [&](int begin, int end, auto body) {
#pragma unroll 1
    for (int i = begin + thread; i < end; i += threads) {
      const int row = divide_down(i, quarter);
      body(i, row, (i - row * quarter) * 4);
    }
  };
  const auto merge_teams = [&](int row, int d) { return parked.merge(0, teams, row, d); };
  if (ctas == 1) {  // launched without clusters: nothing can be sent
    __syncthreads();
    for_columns(0, columns,
                [&](int, int row, int d) { finish_part(p.call, p.split, segment, item, row, d, merge_teams(row, d)); });
    return;
  }
  const int begin = min_of(rank * parts.each, columns), end = min_of(begin + parts.each, columns);
  if (thread == 0) parts.inbox().expect((end - begin) * ctas * ReceivedParts::kColumnBytes);
  __syncthreads();  // in this order: racecheck follows the barrier only if no wait for the cluster comes before it
  ptx::await_cluster();
  for_columns(0, columns, [&](int i, int row, int d) {
    const RowPart sum = merge_teams(row, d);
    const int to = divide_down(i, parts.each), column = i - to * parts.each;
    parts.inbox().send(to, &parts.values(rank, column), sum.o);
    parts.inbox().send(to, reinterpret_cast<float2*>(&parts.state(rank, column)), {sum.state.max, sum.state.sum});
  });
  parts.inbox().wait();
  for_columns(begin, end, [&](int i, int row, int d) {
    const RowPart sum = merge_parts(
        ctas, [&](int from) { return parts.state(from, i - begin); },
        [&](int from) { return parts.values(from, i - begin); });
    finish_part(p.call, p.split, segment, item, row, d, sum);
  });
}

}  // namespace flashq::cuda
