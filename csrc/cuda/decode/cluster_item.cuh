// An item that a cluster computes alone: its teams' shares, and the merge of their results in shared memory.
#pragma once
#include "cuda/decode/call.h"
#include "cuda/decode/merge_rows.cuh"
#include "cuda/ptx/cluster.cuh"
#include "cuda/ptx/ldmatrix.cuh"

namespace flashq::cuda {

// The share that one of `shares` teams at most has of the item of a cluster; not given() if it has none.
__device__ __forceinline__ Segment share_item(const DecodeParams& p, int cluster, int share, int shares) {
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

// Where teams park the results of an item, in place of their rings.
template <int kDim> class ParkedRows {
 public:
  static constexpr int kStride = kDim + 4;  // floats

  // `rings` are `team_bytes` each; an item has `rows` at most.
  __device__ __forceinline__ ParkedRows(unsigned char* rings, int team_bytes, int rows)
      : rings_(rings), team_bytes_(team_bytes), rows_(rows) {}

  __device__ __forceinline__ float* row(int team, int row) const {
    return reinterpret_cast<float*>(rings_ + team * team_bytes_) + row * kStride;
  }
  __device__ __forceinline__ SoftmaxState<Binary>& state(int team, int row) const {
    return reinterpret_cast<SoftmaxState<Binary>*>(this->row(team, rows_))[row];
  }
  // Of all teams of the CTA; their sums take the place of the first team's.
  __device__ __forceinline__ SoftmaxState<Binary>& total(int row) const { return state(0, rows_ + row); }

 private:
  unsigned char* rings_;
  int team_bytes_, rows_;
};

// Merges the parked results of a cluster and writes out and lse; all of its threads call it. `parked` are this CTA's,
// of `teams` teams.
template <int kDim>
__device__ __forceinline__ void merge_cluster(const DecodeParams& p, const Segment& segment, const ItemRows& item,
                                              const ParkedRows<kDim>& parked, int teams, int rank) {
  const int ctas = p.cluster_ctas, quarter = static_cast<int>(p.call.query.head_dim) / 4, columns = item.rows * quarter;
  const auto thread = static_cast<int>(threadIdx.x), threads = static_cast<int>(blockDim.x);
  __syncthreads();
#pragma unroll 1
  for (int i = thread; i < columns; i += threads) {
    const int row = divide_down(i, quarter), d = (i - row * quarter) * 4;
    RowPart sum;
#pragma unroll 1
    for (int team = 0; team < teams; ++team)
      sum.merge_with({parked.state(team, row), *reinterpret_cast<const float4*>(parked.row(team, row) + d)});
    if (ctas == 1) {
      finish_part(p.call, p.split, segment, item, row, d, sum);
      continue;
    }
    *reinterpret_cast<float4*>(parked.row(0, row) + d) = sum.o;
    if (d == 0) parked.total(row) = sum.state;
  }
  if (ctas == 1) return;
  ptx::sync_cluster();
  // Each CTA finishes its share of the columns; neighbouring lanes have the CTAs' parts of one.
  const int shift = p.cluster_shift, each = (columns + ctas - 1) >> shift, begin = rank * each,
            end = min_of(columns, begin + each);
  const int lane = thread & (ctas - 1), side = threads >> shift;
#pragma unroll 1
  for (int base = begin; base < end; base += side) {
    const int i = base + (thread >> shift), row = i < end ? divide_down(i, quarter) : 0;
    const int d = i < end ? (i - row * quarter) * 4 : 0;
    float state[2], o[4];
    ptx::load_from_block(state, ptx::shared_address(&parked.total(row)), lane);
    ptx::load_from_block(o, ptx::shared_address(parked.row(0, row) + d), lane);
    const RowPart sum = merge_lanes({{state[0], state[1]}, {o[0], o[1], o[2], o[3]}}, ctas);
    if (lane == 0 && i < end) finish_part(p.call, p.split, segment, item, row, d, sum);
  }
  ptx::sync_cluster();  // nobody reads a block's shared memory that has ended
}

}  // namespace flashq::cuda
