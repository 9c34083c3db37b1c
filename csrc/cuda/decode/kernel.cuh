// Split-KV attention over a cache in 16 bit: few rows, many keys, so it is bound by the read of K and V.
//
// 1, 2 or 4 warps form a team with a ring of tiles, which streams its own share of the plan (plan.cuh); teams meet only
// where they merge the results of an item. K and V are the left operands of mma.m16n8k16, so that 8 rows cost one
// product and no padding is read:
//   S^T (16 tokens, 8 rows) = K (16, dim) Q^T (dim, 8),   O^T (dim, 8) += V^T (dim, 16) P^T (16, 8).
// Rows stand in the same lanes in S^T and in O^T, and movmatrix makes P^T an operand out of S^T.
#pragma once
#include <type_traits>

#include "cuda/decode/cluster_item.cuh"
#include "cuda/decode/key_stream.cuh"
#include "cuda/decode/plan_table.cuh"
#include "cuda/decode/row_results.cuh"
#include "cuda/decode/wide_rows.cuh"
#include "cuda/ptx/barrier.cuh"
#include "cuda/ptx/dependent_launch.cuh"
#include "cuda/ptx/tma.cuh"

namespace flashq::cuda {

inline constexpr int kMaxDecodeThreads = 256;

// What a warp loads and what it computes: the first runs ahead. And the group that its team merges with, if any.
struct WarpSegments {
  Segment loaded, segment;
  ItemRows item;
  TeamGroup group;
};

// Whether a warp keeps its query rows in registers; else they are in shared memory.
template <int kDim, int kTiles> inline constexpr bool kQueryInRegisters = kTiles * kDim <= 256;

// Byte offsets in dynamic shared memory. The rings come first, (teams, stages) tiles, and before them in the same place
// the PlanTable; ReceivedParts are behind the end.
template <int kDim, int kTiles> struct DecodeShared {
  static constexpr int kWarpRows = 8 * kTiles;

  int query, ranges, segments, found, end;

  FLASHQ_HD DecodeShared(int warps, int stages) {
    query = warps * stages * 2 * kGroup * kDim * 2;                                         // (warps, rows, kDim)
    ranges = query + (kQueryInRegisters<kDim, kTiles> ? 0 : warps * kWarpRows * kDim * 2);  // (warps, rows)
    segments = ranges + warps * kWarpRows * int{sizeof(TileRange)};                         // (warps)
    found = segments + warps * int{sizeof(WarpSegments)};                                   // (warps, stages) words
    end = (found + warps * stages * 4 + 15) / 16 * 16;
  }
};

// T: Float16 or Bfloat16. kTiles: 8-row tiles of a warp. kDepth: 16-token groups that are computed at a time; of four,
// by wgmma for a team's 64 rows. kCluster: clusters compute an item each (p.cluster_ctas). That code is short, because
// much of it has to come from the L2.
template <class T, int kDim, int kTiles, int kDepth, bool kCluster>
__device__ __forceinline__ void decode_items(const DecodeParams& p) {
  constexpr bool kWide = kDepth == 4;
  using Shared = DecodeShared<kDim, kTiles>;
  using Tile = std::conditional_t<kWide, BoxedTile<kDim>, SharedTile<kDim>>;
  using Stream = KeyStream<kDim, kCluster, Tile>;
  constexpr int kSteps = kDim / 16, kWarpRows = Shared::kWarpRows;
  // Sums of a score: four chains of products keep the tensor cores busy.
  constexpr int kSums = kWide ? 1 : 4 / (kTiles * kDepth);
  constexpr uint32_t kAllThere = kDepth == 2 ? ~0u : 0xffff;
  extern __shared__ __align__(1024) unsigned char shared[];
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  const int warps = static_cast<int>(blockDim.x) / 32, team_warps = p.team_warps;
  const int teams = warps >> p.team_shift, team = warp >> p.team_shift, row_warp = warp & (team_warps - 1);
  const int g = lane / 4, t = lane % 4, stages = p.stages, tile_tokens = kGroup * team_warps;
  const Shared at(warps, stages);
  const int tile_bytes = 2 * team_warps * Stream::kGroupBytes;
  const uint32_t base = ptx::shared_address(shared), ring = base + team * stages * tile_bytes;
  auto* found = reinterpret_cast<uint32_t*>(shared + at.found);  // (teams, stages, team_warps)
  const auto found_of = [&](int stage) { return found + (team * stages + stage) * team_warps; };
  const auto sync_team = [&] {
    if (team_warps == 1)
      __syncwarp();
    else
      ptx::named_barrier_sync(1 + team, 32 * team_warps);
  };

  WarpSegments& mine = reinterpret_cast<WarpSegments*>(shared + at.segments)[warp];
  const Segment& segment = mine.segment;
  const ItemRows& item = mine.item;
  const auto cta = static_cast<int>(blockIdx.x);
  const int cluster_ctas = kCluster ? p.cluster_ctas : 0, cluster = cta >> p.cluster_shift;
  const int rank = cta - cluster * cluster_ctas;
  // Neighbouring shares lie on different multiprocessors: a few of them do not crowd on one.
  int worker = kCluster ? team * cluster_ctas + rank : team * static_cast<int>(gridDim.x) + cta;
  const auto start = [] {
    ptx::wait_for_primary();
    ptx::allow_dependents();  // which read the lengths at once
  };
  if (kCluster && cluster_ctas > 1) {
    if (threadIdx.x == 0) reinterpret_cast<ptx::Inbox*>(shared + at.end)->open();
    ptx::greet_cluster();
  }
  {
    const auto fill = [&](int batch, int token, bool padding) { write_blind_token(p.call, batch, token, padding); };
    Segment first{};
    TeamGroup group{};
    if constexpr (kCluster) {
      start();
      first = share_item(p, cluster, worker, cluster_ctas * teams);
    } else if (PlanTable::holds(p.call)) {
      auto& table = *reinterpret_cast<PlanTable*>(shared);
      static_assert(sizeof table <= 2 * 2 * Stream::kGroupBytes);
      // The kernel before this one may still run: the plan is made meanwhile, once more if it has changed the lengths.
#pragma unroll 1
      for (bool started = false;;) {
        const Division division = table.build(p.call, p.split, p.alike);
        worker = division.merged > 0 ? cta * teams + team : team * static_cast<int>(gridDim.x) + cta;
        first = table.find(p.call, p.split, division, worker);
        group = TeamGroup::find(division, first, team, worker);
        if (started) break;
        start();
        started = true;
        if (!table.outdated(p.call, p.split)) break;
      }
#pragma unroll 1
      for (int b = cta + warp * static_cast<int>(gridDim.x); b < p.call.query.batch;
           b += warps * static_cast<int>(gridDim.x))
        for (int i = 0; table.blind(b) && i < p.call.query.q_len; ++i) fill(b, i, false);
      __syncthreads();  // the rings take its place
    } else {
      start();
      first = plan_worker(p.call, p.split, worker, fill);
    }
    if (!first.given() && !kCluster) return;
    const ItemRows rows(p.call, p.split, first);
    if (lane == 0) {
      mine.segment = mine.loaded = first;
      mine.item = rows;
      mine.group = group;
    }
    __syncwarp();
  }
  Stream stream(p, mine.loaded, mine.item);
  int load_stage = 0, stage = 0;
  const int head_dim = static_cast<int>(p.call.query.head_dim);
  if (head_dim < kDim) {  // columns past the head dim, which no copy touches
    unsigned char* own = shared + team * stages * tile_bytes;
    for (int i = row_warp * 32 + lane; i < tile_bytes * stages / 16; i += 32 * team_warps)
      if (const int row = i / (kDim / 8), chunk = i % (kDim / 8); chunk * 8 >= head_dim)
        store(own + (kWide ? row / kWideTokens * (kWideTokens * kDim * 2) + Tile::offset(row % kWideTokens, chunk)
                           : Tile::offset(row, chunk)),
              Vector<uint32_t, 4>{});
    sync_team();
  }

  // Where this lane's rows of the 8 x 8 operands lie within 16 tokens of K and of V, and within the query.
  const uint32_t k_lane = SharedTile<kDim>::offset(lane % 8 + lane / 8 % 2 * 8, lane / 16);
  const uint32_t v_lane = SharedTile<kDim>::offset(lane % 8 + lane / 16 * 8, lane / 8 % 2);
  unsigned char* const own_query = shared + at.query + warp * kWarpRows * Stream::kRowBytes;
  const uint32_t q_lane = ptx::shared_address(own_query) + SharedTile<kDim>::offset(lane % 8, lane / 8);
  const ParkedRows<kDim> parked(shared, stages * tile_bytes, kWarpRows * team_warps);
  auto* ranges = reinterpret_cast<TileRange*>(shared + at.ranges) + warp * kWarpRows;

  for (bool first_segment = true; segment.given(); first_segment = false) {
    std::conditional_t<kWide, WideRows<kDim>, RowSums<kTiles, kSteps>> rows;
    uint32_t q[kTiles][kQueryInRegisters<kDim, kTiles> ? 2 * kSteps : 1];
    int origin = 0, end = 0, clear_begin = 0, clear_end = 0;
    bool busy = false;

    // Before the first segment the ring is filled, in turns with negative numbers.
#pragma unroll 1
    for (int tile = first_segment ? 1 - stages : 0;; tile < 0 ? ++tile : (origin += tile_tokens, tile = 1)) {
      if (tile == 0) {
        if (!first_segment) publish(mine.item, ItemRows(p.call, p.split, segment));
        origin = item.begin & -tile_tokens;
        end = clear_end = item.end;
        clear_begin = item.begin;
        busy = row_warp * kWarpRows < item.rows;
        if (item.first_query == item.last_query) {
          if (lane < kWarpRows) ranges[lane] = {clear_begin, clear_end};
        } else {
          const Mask mask = segment.sequence.mask(p.call.score);
          const auto in_item = [&](int64_t key) { return static_cast<int>(clamp(key, item.begin, item.end)); };
          clear_begin = in_item(mask.visible(item.last_query).begin);
          clear_end = in_item(mask.visible(item.first_query).end);
          if (lane < kWarpRows) {
            const int row = min_of(row_warp * kWarpRows + lane, item.rows - 1);
            const KeyRange keys = mask.visible(p.split.group.quotient(item.first_row + row));
            ranges[lane] = {in_item(keys.begin), in_item(keys.end)};
          }
        }
        if constexpr (kQueryInRegisters<kDim, kTiles>) {
#pragma unroll
          for (int n = 0; n < kTiles; ++n) {
            const QueryRow row(p, segment, item, row_warp * kWarpRows + 8 * n + g);
            row.load_pairs<kDim>(p, q[n]);
          }
        } else {
#pragma unroll 1
          for (int n = 0; n < kTiles; ++n) {
            const QueryRow row(p, segment, item, row_warp * kWarpRows + 8 * n + g);
#pragma unroll 8
            for (int i = 0; i < kSteps * 2; ++i)
              store(own_query + SharedTile<kDim>::offset(8 * n + g, i) + 4 * t, row.pair(p, 8 * i + 2 * t));
          }
        }
        __syncwarp();
      }
      if (tile >= 0) {
        if (origin >= end) break;
        if (stages == 2)
          ptx::cp_async_wait<0>();
        else if (stages == 3)
          ptx::cp_async_wait<1>();
        else
          ptx::cp_async_wait<2>();
        if constexpr (kWide) ptx::fence_async_proxy();
      }
      sync_team();  // the tile is there, and nobody reads the one before it any more
      stream.load_next(p, ring + load_stage * tile_bytes, found_of(load_stage) + row_warp);
      load_stage = load_stage + 1 == stages ? 0 : load_stage + 1;
      if (tile < 0) continue;
      const uint32_t here = ring + stage * tile_bytes;
      const uint32_t* pages = found_of(stage);
      stage = stage + 1 == stages ? 0 : stage + 1;
      if constexpr (kWide) {
        const bool clear = origin >= clear_begin && origin + kWideTokens <= clear_end &&
                           (pages[0] & pages[1] & pages[2] & pages[3]) == kAllThere;
        rows.template attend<T>(p.rule, q, shared + (here - base), shared + (here - base) + kWideTokens * kDim * 2,
                                origin, clear, ranges, pages);
        continue;
      } else {
        if (!busy) continue;
#pragma unroll 1
        for (int part = 0; part < team_warps; part += kDepth) {
          const int first = origin + part * kGroup;
          if (first >= end) break;
          const uint32_t k_at = here + part * Stream::kGroupBytes + k_lane;
          const uint32_t v_at = here + (team_warps + part) * Stream::kGroupBytes + v_lane;
          float sums[kSums][kDepth * kTiles][4] = {};
          float (&s)[kDepth * kTiles][4] = sums[0];
          uint32_t two_steps[kTiles][4];
#pragma unroll
          for (int i = 0; i < kSteps; ++i)
#pragma unroll
            for (int j = 0; j < kDepth; ++j) {
              uint32_t a[4];
              ptx::ldmatrix_x4(a, (k_at + j * Stream::kGroupBytes) ^ (i * 32));
#pragma unroll
              for (int n = 0; n < kTiles; ++n) {
                float (&sum)[4] = sums[i % kSums][j * kTiles + n];
                if constexpr (kQueryInRegisters<kDim, kTiles>) {
                  ptx::mma_16x8x16<T>(sum, a, q[n][2 * i], q[n][2 * i + 1]);
                } else {
                  if (i % 2 == 0 && j == 0)
                    ptx::ldmatrix_x4(two_steps[n], (q_lane + n * 8 * Stream::kRowBytes) ^ (i * 32));
                  ptx::mma_16x8x16<T>(sum, a, two_steps[n][i % 2 * 2], two_steps[n][i % 2 * 2 + 1]);
                }
              }
            }
#pragma unroll
          for (int i = 0; i < kDepth * kTiles * 4; ++i) {
            if constexpr (kSums == 4)
              s[i / 4][i % 4] += sums[1][i / 4][i % 4] + (sums[2][i / 4][i % 4] + sums[3][i / 4][i % 4]);
            else if constexpr (kSums == 2)
              s[i / 4][i % 4] += sums[1][i / 4][i % 4];
          }
          p.rule.apply(reinterpret_cast<float (&)[1][kDepth * kTiles][4]>(s));
          uint32_t there = pages[part];
          if constexpr (kDepth == 2) there |= pages[part + 1] << kGroup;
          const bool clear = first >= clear_begin && first + kDepth * kGroup <= clear_end && there == kAllThere;
          uint32_t hidden = 0;  // scores, by number, of keys that their row does not see
          float least[kTiles][2];
#pragma unroll
          for (int i = 0; i < 2 * kTiles; ++i) least[i / 2][i % 2] = kLeastMaximum;
          if (!clear) {
#pragma unroll
            for (int n = 0; n < kTiles; ++n)
#pragma unroll
              for (int c = 0; c < 2; ++c) {
                const TileRange keys = ranges[8 * n + 2 * t + c];
                bool sees = false;
#pragma unroll
                for (int j = 0; j < 2 * kDepth; ++j) {
                  const int token = g + 8 * j, number = (j / 2 * kTiles + n) * 4 + j % 2 * 2 + c;
                  if (first + token < keys.begin || first + token >= keys.end || !(there >> token & 1))
                    hidden |= 1u << number;
                  else
                    sees = true;
                }
                if (!sees) least[n][c] = -kInf;
              }
#pragma unroll
            for (int i = 0; i < 4 * kDepth * kTiles; ++i) s[i / 4][i % 4] = hidden >> i & 1 ? -kInf : s[i / 4][i % 4];
          }
          rows.template raise_maxima<kDepth>(s, least);
#pragma unroll
          for (int i = 0; i < 4 * kDepth * kTiles; ++i)
            s[i / 4][i % 4] = ptx::exp2_approx(s[i / 4][i % 4] - rows.max[i / 4 % kTiles][i % 2]);
          if (!clear) {  // NaN where a row has seen nothing yet
#pragma unroll
            for (int i = 0; i < 4 * kDepth * kTiles; ++i) s[i / 4][i % 4] = hidden >> i & 1 ? 0 : s[i / 4][i % 4];
          }
          uint32_t weight[kTiles][2 * kDepth];  // P^T, 8 tokens each
#pragma unroll
          for (int n = 0; n < kTiles; ++n)
#pragma unroll
            for (int j = 0; j < 2 * kDepth; ++j) {
              const float* x = &s[j / 2 * kTiles + n][j % 2 * 2];
              rows.sum[n][0] += x[0];
              rows.sum[n][1] += x[1];
              weight[n][j] = ptx::transpose_8x8(ptx::pack<T>(x[0], x[1]));
            }
#pragma unroll
          for (int j = 0; j < kDepth; ++j)
#pragma unroll
            for (int i = 0; i < kSteps; ++i) {
              uint32_t a[4];
              ptx::ldmatrix_x4_trans(a, (v_at + j * Stream::kGroupBytes) ^ (i * 32));
#pragma unroll
              for (int n = 0; n < kTiles; ++n)
                ptx::mma_16x8x16<T>(rows.acc[n][i], a, weight[n][2 * j], weight[n][2 * j + 1]);
            }
        }
      }
    }

    rows.complete_sums();
    rows.template copy_lone_values<T>(p, segment, item, row_warp * kWarpRows);
    const auto park = [&] {
      sync_team();  // its ring is free
      rows.park(
          p, item, row_warp * kWarpRows, [&](int row) { return parked.row(team, row); },
          [&](int row) -> auto& { return parked.state(team, row); });
    };
    if constexpr (kCluster) {
      park();
      break;
    }
    if (segment.whole()) {
      rows.template finish<T>(p, segment, item, row_warp * kWarpRows);
    } else if (mine.group.teams > 0) {
      park();
      merge_group<kDim>(p, segment, item, parked, mine.group);
      break;
    } else {
      const int slot = p.split.unit_is_split ? segment.item_base + segment.lo : 2 * worker + !first_segment;
      rows.park(
          p, item, row_warp * kWarpRows, [&](int row) { return p.partials.row(slot, row); },
          [&](int row) -> auto& { return p.partials.state(slot, row); });
    }
    publish(mine.segment, next_segment(p.call, p.split, segment));
  }
  if constexpr (kCluster) {
    const int shares = min_of(segment.sequence.units, cluster_ctas * teams);  // of which every cluster_ctas-th is here
    merge_cluster<kDim>(p, segment, item, parked, shared + at.end,
                        (shares - rank + cluster_ctas - 1) >> p.cluster_shift, rank);
  }
}

template <class T, int kDim, int kTiles, int kDepth, bool kCluster>
__global__ void __launch_bounds__(kMaxDecodeThreads, 1) decode_kernel(const __grid_constant__ DecodeParams p) {
#if !defined(__CUDA_ARCH_FEAT_SM90_ALL)
  if constexpr (kDepth == 4)
    __trap();  // never launched
  else
#endif
    decode_items<T, kDim, kTiles, kDepth, kCluster>(p);
}

}  // namespace flashq::cuda
