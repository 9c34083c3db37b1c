// Results of an item that teams of a CTA hand each other in shared memory.
#pragma once
#include "cuda/decode/call.h"
#include "cuda/decode/merge_rows.cuh"
#include "cuda/ptx/barrier.cuh"

namespace flashq::cuda {

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

  // Four columns of a row, over `teams` teams.
  __device__ __forceinline__ RowPart merge(int first_team, int teams, int row, int d) const {
    return merge_parts(
        teams, [&](int i) { return state(first_team + i, row); },
        [&](int i) { return *reinterpret_cast<const float4*>(this->row(first_team + i, row) + d); });
  }

 private:
  unsigned char* rings_;
  int team_bytes_, rows_;
};

// Teams of several warps are four at most, and have named barriers from 1 on (`sync_team`); behind those, a group of
// teams that merge has that of its first team.
inline constexpr int kGroupBarrier = 8;

// Neighbouring teams of a CTA that have keys of one item, each no other.
struct TeamGroup {
  int first_team, teams;
  int slot;  // of their partial result; -1: all of the item is theirs

  // The group of `team`; `worker`: that team's number in the plan, `segment`: its own.
  static __device__ __forceinline__ TeamGroup find(const Division& d, const Segment& segment, int team, int worker) {
    if (d.merged == 0 || !segment.given()) return {};
    const int first_team = team & -d.merged, first_worker = worker - team + first_team;
    const int used = min_of(segment.sequence.units, d.item_workers), behind = used - first_worker % d.item_workers;
    return {first_team, min_of(behind, d.merged), used <= d.merged ? -1 : 2 * first_worker};
  }
};

// Merges what the teams of a group have parked, and writes out and lse, or a partial result. All of their threads call
// it.
template <int kDim>
__device__ __forceinline__ void merge_group(const DecodeParams& p, const Segment& segment, const ItemRows& item,
                                            const ParkedRows<kDim>& parked, const TeamGroup& group) {
  const int quarter = static_cast<int>(p.call.query.head_dim) / 4, columns = item.rows * quarter;
  const int first_thread = 32 * group.first_team << p.team_shift, threads = 32 * group.teams << p.team_shift;
  ptx::named_barrier_sync(kGroupBarrier + group.first_team, threads);
#pragma unroll 1
  for (int i = static_cast<int>(threadIdx.x) - first_thread; i < columns; i += threads) {
    const int row = divide_down(i, quarter), d = (i - row * quarter) * 4;
    const RowPart sum = parked.merge(group.first_team, group.teams, row, d);
    if (group.slot < 0) {
      finish_part(p.call, p.split, segment, item, row, d, sum);
    } else {
      *reinterpret_cast<float4*>(p.partials.row(group.slot, row) + d) = sum.o;
      if (d == 0) p.partials.state(group.slot, row) = sum.state;
    }
  }
}

}  // namespace flashq::cuda
