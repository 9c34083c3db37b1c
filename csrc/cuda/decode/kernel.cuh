// Split-KV attention over a cache in 16 bit: few rows, many keys, so it is bound by the read of K and V.
//
// A persistent CTA streams its share of the plan (plan.cuh). 1, 2 or 4 warps form a team with a ring of tiles; teams
// take turns on the tiles of a segment and know nothing of each other until its end, where their results are merged.
// K and V are the left operands of mma.m16n8k16, so that 8 rows cost one product and no padding is read:
//   S^T (16 tokens, 8 rows) = K (16, dim) Q^T (dim, 8),   O^T (dim, 8) += V^T (dim, 16) P^T (16, 8).
// Rows stand in the same lanes in S^T and in O^T, and movmatrix makes P^T an operand out of S^T.
#pragma once
#include "cuda/decode/finish.cuh"
#include "cuda/decode/key_stream.cuh"
#include "cuda/ptx/barrier.cuh"
#include "cuda/ptx/dependent_launch.cuh"

namespace flashq::cuda {

inline constexpr int kMaxDecodeThreads = 256;

// What a warp loads and what it computes: the first runs ahead.
struct WarpSegments {
  LoadedSegment loaded;
  Segment segment;
  ItemRows item;
};

// Byte offsets in dynamic shared memory.
template <int kDim, int kTiles> struct DecodeShared {
  static constexpr int kMergeStride = kDim + 4;  // floats: no bank conflicts when fragments are parked

  int rows;                                                 // of an item
  int query, parked, states, ranges, segments, found, end;  // the rings come first: (teams, stages) tiles

  FLASHQ_HD DecodeShared(int warps, int team_warps, int stages) {
    const int teams = warps / team_warps;
    rows = 8 * kTiles * team_warps;
    query = warps * stages * 2 * KeyStream<kDim>::kGroupBytes;  // (rows, kDim)
    parked = query + rows * kDim * 2;                           // (teams, rows, kMergeStride) floats
    states = parked + teams * rows * kMergeStride * 4;          // (teams, rows)
    ranges = states + teams * rows * 8;                         // (rows)
    segments = ranges + rows * 8;                               // (warps)
    found = segments + warps * int{sizeof(WarpSegments)};       // (warps, stages) words
    end = found + warps * stages * 4;
  }
};

template <int kDim> __device__ __forceinline__ void load_item_queries(const DecodeParams& p, const Segment& segment,
                                                                      const ItemRows& item, unsigned char* to,
                                                                      int rows) {
  constexpr int kChunks = kDim / 8;
  const QueryView& q = p.call.query;
  const int group = p.split.group_size();
  for (int i = static_cast<int>(threadIdx.x); i < rows * kChunks; i += static_cast<int>(blockDim.x)) {
    const int row = i / kChunks, chunk = i % kChunks;
    Vector<uint16_t, 8> x{};
    if (row < item.rows && chunk * 8 < q.head_dim) {
      const int query = p.split.group.quotient(item.first_row + row), head = item.first_row + row - query * group;
      const auto* from = static_cast<const uint16_t*>(q.q) + segment.sequence.batch * q.q_stride[0] +
                         (segment.sequence.q_begin + query) * q.q_stride[1] +
                         (item.kv_head * group + head) * q.q_stride[2] + chunk * 8;
      if (p.wide_q) {
        x = load<Vector<uint16_t, 8>>(from);
      } else {
        for (int j = 0; j < 8; ++j) x.value[j] = from[j];
      }
    }
    store(to + SharedTile<kDim>::offset(row, chunk), x);
  }
}

// Four values of a key's V row as they are: a sum would lose the sign of a -0.
template <class T> __device__ __forceinline__ float4 load_value(const KvView& kv, int64_t batch, int64_t kv_head,
                                                                int64_t key, int64_t d) {
  int64_t page = batch, slot = key;
  if (kv.block_table.given()) {
    const Quotient at = divide(key, kv.page_size);
    page = kv.block_table(batch, at.quotient);
    slot = at.remainder;
  }
  const auto* v =
      static_cast<const uint16_t*>(kv.v) + page * kv.v_stride[0] + slot * kv.v_stride[1] + kv_head * kv.v_stride[2] + d;
  return {T::load(v[0]), T::load(v[1]), T::load(v[2]), T::load(v[3])};
}

// T: Float16 or Bfloat16. kTiles: 8-row tiles of a warp.
template <class T, int kDim, int kTiles> __global__ void __launch_bounds__(kMaxDecodeThreads, 1)
    decode_kernel(const __grid_constant__ DecodeParams p) {
  using Shared = DecodeShared<kDim, kTiles>;
  using Stream = KeyStream<kDim>;
  constexpr int kSteps = kDim / 16;
  constexpr bool kQueryInRegisters = kTiles * kDim <= 256;
  // 16-token groups at a time, and sums of their scores: two of either keep the tensor cores busy.
  constexpr int kDepth = kTiles == 2 && kDim <= 128 ? 2 : 1, kSums = 2 / kDepth;
  constexpr uint32_t kAllThere = kDepth == 2 ? ~0u : 0xffff;
  extern __shared__ __align__(1024) unsigned char shared[];
  ptx::allow_dependents();

  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  const int warps = static_cast<int>(blockDim.x) / 32, team_warps = p.team_warps;
  const int teams = warps >> p.team_shift, team = warp >> p.team_shift, row_warp = warp & (team_warps - 1);
  const int g = lane / 4, t = lane % 4, stages = p.stages, tile_tokens = kGroup * team_warps;
  const Shared at(warps, team_warps, stages);
  const int tile_bytes = 2 * team_warps * Stream::kGroupBytes;
  const uint32_t base = ptx::shared_address(shared), ring = base + team * stages * tile_bytes;
  auto* found = reinterpret_cast<uint32_t*>(shared + at.found);  // (teams, stages, team_warps)
  const auto found_of = [&](int stage) { return found + (team * stages + stage) * team_warps; };
  const int head_dim = static_cast<int>(p.call.query.head_dim), group = p.split.group_size();
  const auto sync_team = [&] {
    if (team_warps == 1)
      __syncwarp();
    else
      ptx::sync_named(1 + team, 32 * team_warps);
  };

  const auto cta = static_cast<int>(blockIdx.x);
  WarpSegments& mine = reinterpret_cast<WarpSegments*>(shared + at.segments)[warp];
  const Segment& segment = mine.segment;
  const ItemRows& item = mine.item;
  CtaShare share{};
  {
    const Segment first = plan_cta(p.call, p.split, share, [&](int batch, int token, bool padding) {
      write_blind_token(p.call, batch, token, padding);
    });
    if (!first.given()) {
      if (p.partials.lists && threadIdx.x == 0) p.partials.lists[cta].count = 0;
      return;
    }
    if (lane == 0) mine.segment = mine.loaded.segment = first;
    __syncwarp();
  }
  const int more_items = p.split.unit_is_split ? share.begin(cta) : 2 * cta;
  int split_items = 0;
  Stream stream(p, mine.loaded);
  int load_stage = 0, stage = 0;
  if (head_dim < kDim) {  // columns past the head dim, which no copy touches
    const int rows = at.query / Stream::kRowBytes;
    for (int i = static_cast<int>(threadIdx.x); i < rows * (kDim / 8); i += static_cast<int>(blockDim.x)) {
      if (i % (kDim / 8) * 8 >= head_dim)
        store(shared + SharedTile<kDim>::offset(i / (kDim / 8), i % (kDim / 8)), Vector<uint32_t, 4>{});
    }
  }

  // Where this lane's rows of the 8 x 8 operands lie within 16 tokens of K and of V, and within the query.
  const uint32_t k_lane = SharedTile<kDim>::offset(lane % 8 + lane / 8 % 2 * 8, lane / 16);
  const uint32_t v_lane = SharedTile<kDim>::offset(lane % 8 + lane / 16 * 8, lane / 8 % 2);
  const uint32_t q_lane = base + at.query + SharedTile<kDim>::offset(row_warp * 8 * kTiles + lane % 8, lane / 8);

  for (bool first_segment = true; segment.given(); first_segment = false) {
    float max[kTiles][2], sum[kTiles][2], acc[kTiles][kSteps][4] = {};
#pragma unroll
    for (int n = 0; n < kTiles; ++n)
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        max[n][c] = -kInf;
        sum[n][c] = 0;
      }
    uint32_t q[kTiles][kSteps / 2][4];  // of two steps
    const auto load_query = [&](int n, int step2) {
      ptx::ldmatrix_x4(q[n][step2], (q_lane + n * 8 * Stream::kRowBytes) ^ (step2 * 64));
    };
    auto* ranges = reinterpret_cast<TileRange*>(shared + at.ranges);  // (rows)
    // Whether this lane's row 8 n + 2 t + c does not see a key.
    const auto hides = [&](int n, int c, int key, bool there) {
      const TileRange keys = ranges[row_warp * 8 * kTiles + 8 * n + 2 * t + c];
      return key < keys.begin || key >= keys.end || !there;
    };
    int origin = 0, tiles = 0, clear_begin = 0, clear_end = 0;
    bool busy = false;

    // Before the first segment the ring is filled, in turns with negative numbers.
#pragma unroll 1
    for (int tile = first_segment ? team - (stages - 1) * teams : team;; tile += teams) {
      if (tile == team) {
        publish(mine.item, ItemRows(p.call, p.split, segment));
        const Mask mask = segment.sequence.mask(p.call.score);
        origin = item.begin & -tile_tokens;
        tiles = (item.end - origin + tile_tokens - 1) >> (kGroupShift + p.team_shift);
        const auto in_item = [&](int64_t key) { return static_cast<int>(clamp(key, item.begin, item.end)); };
        clear_begin = in_item(mask.visible(item.last_query).begin);
        clear_end = in_item(mask.visible(item.first_query).end);
        busy = row_warp * 8 * kTiles < item.rows;
        load_item_queries<kDim>(p, segment, item, shared + at.query, at.rows);
        for (int row = static_cast<int>(threadIdx.x); row < at.rows; row += static_cast<int>(blockDim.x)) {
          const KeyRange keys = mask.visible(p.split.group.quotient(item.first_row + min_of(row, item.rows - 1)));
          ranges[row] = {in_item(keys.begin), in_item(keys.end)};
        }
        __syncthreads();
        if constexpr (kQueryInRegisters) {
#pragma unroll
          for (int n = 0; n < kTiles; ++n)
#pragma unroll
            for (int i = 0; i < kSteps / 2; ++i) load_query(n, i);
        }
      }
      if (tile >= 0) {
        if (tile >= tiles) break;
        if (stages == 2)
          ptx::cp_async_wait<0>();
        else if (stages == 3)
          ptx::cp_async_wait<1>();
        else
          ptx::cp_async_wait<2>();
      }
      sync_team();  // the tile is there, and nobody reads the one before it any more
      stream.load_next(p, ring + load_stage * tile_bytes, found_of(load_stage) + row_warp);
      load_stage = load_stage + 1 == stages ? 0 : load_stage + 1;
      if (tile < 0) continue;
      const uint32_t here = ring + stage * tile_bytes;
      const uint32_t* pages = found_of(stage);
      stage = stage + 1 == stages ? 0 : stage + 1;
      if (!busy) continue;
#pragma unroll 1
      for (int part = 0; part < team_warps; part += kDepth) {
        const int first = origin + tile * tile_tokens + part * kGroup;
        if (first >= item.end) break;
        const uint32_t k_at = here + part * Stream::kGroupBytes + k_lane;
        const uint32_t v_at = here + (team_warps + part) * Stream::kGroupBytes + v_lane;
        float s[kDepth][kSums][kTiles][4] = {};
#pragma unroll
        for (int i = 0; i < kSteps; ++i)
#pragma unroll
          for (int j = 0; j < kDepth; ++j) {
            uint32_t a[4];
            ptx::ldmatrix_x4(a, (k_at + j * Stream::kGroupBytes) ^ (i * 32));
#pragma unroll
            for (int n = 0; n < kTiles; ++n) {
              if (!kQueryInRegisters && i % 2 == 0 && j == 0) load_query(n, i / 2);
              ptx::mma_16x8x16<T>(s[j][i % kSums][n], a, q[n][i / 2][i % 2 * 2], q[n][i / 2][i % 2 * 2 + 1]);
            }
          }
        uint32_t there = pages[part];
        if constexpr (kDepth == 2) there |= pages[part + 1] << kGroup;
        const bool clear = first >= clear_begin && first + kDepth * kGroup <= clear_end && there == kAllThere;
        float top[kTiles][2];
        bool raise = false;
#pragma unroll
        for (int n = 0; n < kTiles; ++n)
#pragma unroll
          for (int c = 0; c < 2; ++c) {
            top[n][c] = -kInf;
#pragma unroll
            for (int j = 0; j < 2 * kDepth; ++j) {
              float& x = s[j / 2][0][n][j % 2 * 2 + c];
              if constexpr (kSums == 2) x += s[j / 2][1][n][j % 2 * 2 + c];
              x = p.rule.score(x);
              const int token = g + 8 * j;
              if (!clear && hides(n, c, first + token, there >> token & 1)) x = -kInf;
              top[n][c] = fmaxf(top[n][c], x);
            }
            raise |= top[n][c] > max[n][c] + kLazyGrowth;
          }
        if (__any_sync(~0u, raise)) {
#pragma unroll
          for (int n = 0; n < kTiles; ++n)
#pragma unroll
            for (int c = 0; c < 2; ++c) {
              float high = top[n][c];
#pragma unroll
              for (int step = 4; step < 32; step *= 2) high = fmaxf(high, __shfl_xor_sync(~0u, high, step));
              high = fmaxf(high, max[n][c]);
              const float shrink = high == max[n][c] ? 1 : ptx::exp2_approx(max[n][c] - high);
              max[n][c] = high;
              sum[n][c] *= shrink;
#pragma unroll
              for (int i = 0; i < kSteps; ++i) {
                acc[n][i][c] *= shrink;
                acc[n][i][2 + c] *= shrink;
              }
            }
        }
        uint32_t weight[kTiles][2 * kDepth];  // P^T, 8 tokens each
#pragma unroll
        for (int n = 0; n < kTiles; ++n)
#pragma unroll
          for (int j = 0; j < 2 * kDepth; ++j) {
            float* x = &s[j / 2][0][n][j % 2 * 2];
#pragma unroll
            for (int c = 0; c < 2; ++c) {
              const int token = g + 8 * j;
              // A score of -inf stays NaN where the maximum is -inf too; only keys that are not seen weigh nothing.
              const bool hidden = !clear && hides(n, c, first + token, there >> token & 1);
              x[c] = hidden ? 0 : ptx::exp2_approx(x[c] - max[n][c]);
              sum[n][c] += x[c];
            }
            weight[n][j] = ptx::transpose_8x8(ptx::pack<T>(x[0], x[1]));
          }
#pragma unroll
        for (int j = 0; j < kDepth; ++j)
#pragma unroll
          for (int i = 0; i < kSteps; ++i) {
            uint32_t a[4];
            ptx::ldmatrix_x4_trans(a, (v_at + j * Stream::kGroupBytes) ^ (i * 32));
#pragma unroll
            for (int n = 0; n < kTiles; ++n) ptx::mma_16x8x16<T>(acc[n][i], a, weight[n][2 * j], weight[n][2 * j + 1]);
          }
      }
    }

    // Park the team's result, then merge the teams'.
    auto* parked = reinterpret_cast<float*>(shared + at.parked);
    auto* states = reinterpret_cast<SoftmaxState<Binary>*>(shared + at.states);
    __syncthreads();
#pragma unroll
    for (int n = 0; n < kTiles; ++n)
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const int row = row_warp * 8 * kTiles + 8 * n + 2 * t + c;
#pragma unroll
        for (int step = 4; step < 32; step *= 2) sum[n][c] += __shfl_xor_sync(~0u, sum[n][c], step);
        if (row >= item.rows) continue;
        if (g == 0) states[team * at.rows + row] = {max[n][c], sum[n][c]};
        float* to = parked + (team * at.rows + row) * Shared::kMergeStride + g;
#pragma unroll
        for (int i = 0; i < kSteps; ++i) {
          to[16 * i] = acc[n][i][c];
          to[16 * i + 8] = acc[n][i][2 + c];
        }
      }
    __syncthreads();
    const int slot = p.split.unit_is_split ? segment.item_base + segment.lo : 2 * cta + !first_segment;
    const int columns = head_dim / 4;
    for (int i = static_cast<int>(threadIdx.x); i < item.rows * columns; i += static_cast<int>(blockDim.x)) {
      const int row = i / columns, d = i % columns * 4;
      SoftmaxState<Binary> state;
      float4 o{};
      for (int other = 0; other < teams; ++other)
        merge_values(state, o, states[other * at.rows + row],
                     *reinterpret_cast<const float4*>(parked + (other * at.rows + row) * Shared::kMergeStride + d));
      const int query = p.split.group.quotient(item.first_row + row), head = item.first_row + row - query * group;
      if (state.sum == 1 && fabsf(state.max) < kInf) {  // perhaps the row sees a single key
        const KeyRange keys = segment.sequence.mask(p.call.score).visible(query);
        if (keys.size() == 1) o = load_value<T>(p.call.kv, segment.sequence.batch, item.kv_head, keys.begin, d);
      }
      if (segment.whole()) {
        finish_values(p.call, segment.sequence.batch, segment.sequence.q_begin + query, item.kv_head * group + head, d,
                      state, o);
      } else {
        *reinterpret_cast<float4*>(p.partials.row(slot, row) + d) = o;
        if (d == 0) p.partials.state(slot, row) = state;
      }
    }
    if (!segment.whole() && segment.lo == 0) {  // the item starts here and goes on elsewhere
      if (threadIdx.x == 0) {
        const bool chunks = p.split.unit_is_split;
        const int units = segment.sequence.units, last = segment.item_base + units - 1;
        ItemList& list = p.partials.lists[cta];
        SplitItem& to = split_items == 0 ? list.first : p.partials.items[more_items + split_items];
        to = {.batch = segment.sequence.batch,
              .token = segment.sequence.q_begin,
              .first_row = item.first_row,
              .kv_head = item.kv_head,
              .rows = item.rows,
              .first = slot,
              .next = chunks ? slot + 1 : 2 * (cta + 1),
              .step = chunks ? 1 : 2,
              .count = chunks ? units : share.owner(last) - cta + 1};
      }
      ++split_items;
    }
    publish(mine.segment, next_segment(p.call, p.split, segment));
  }
  if (p.partials.lists && threadIdx.x == 0) {
    p.partials.lists[cta].count = split_items;
    p.partials.lists[cta].more = more_items;
  }
}

}  // namespace flashq::cuda
