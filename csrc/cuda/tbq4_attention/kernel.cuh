// Split-KV attention over a TBQ4 cache: few rows, many keys, so it is bound by the read of codes and norms.
//
// Every warp streams a share of the plan (decode/plan.cuh) of its own and knows nothing of the others. Queries are
// rotated by the warp that needs them, outputs stay rotated until partial results have been merged, and norms multiply
// scores and weights, so that a value costs one table read for two. Codes are the left operands of mma.m16n8k16, rows
// are columns:
//   S^T (16 tokens, 8 rows) = C_k (16, block) Q'^T (block, 8),   O'^T (block, 8) += C_v^T (block, 16) P^T (16, 8).
// Keys of the exact pool are left out: the merge adds them (tbq4_merge.cu).
#pragma once
#include "cuda/ptx/dependent_launch.cuh"
#include "cuda/ptx/fresh_thread.cuh"
#include "cuda/tbq4_attention/code_stream.cuh"
#include "cuda/tbq4_attention/exact_rule.cuh"
#include "cuda/tbq4_attention/results.cuh"
#include "cuda/tbq4_attention/scores.cuh"
#include "cuda/tbq4_attention/slots.cuh"

namespace flashq::cuda {

// kTiles: 8-row tiles of an item.
template <int D, int kTiles> class CodeKernel {
  using Tile = CodeTile<D>;
  using Weights = TileWeights<D, kTiles>;
  static constexpr int kStages = kCodeStages;
  static constexpr int kAcc = D / 16;  // fragments of the outputs of 8 rows

 public:
  __device__ __forceinline__ CodeKernel(const CodeParams& p, unsigned char* shared)
      : p_(p), shared_(shared), mine_(reinterpret_cast<CodeSegments*>(shared + p.at.segments)[threadIdx.x / 32]) {
    const uint32_t lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    lane4_ = keep(lane * 4);
    k_lane_ = keep(kPairTableBytes + Tile::swizzle(Tile::piece(g) * 256 + t * (Tile::kWords * 4)));
    v_lane_ = keep(kPairTableBytes + Tile::kBytes + Tile::swizzle(t * 256 + g * (Tile::kWidth / 16)));
  }

  __device__ __forceinline__ void run() {
    const int ctas = p_.cluster_ctas, warps = static_cast<int>(blockDim.x) / 32;
    ptx::wait_for_primary();
    ptx::allow_dependents();  // not before: the merge relies on what was written before this kernel
    {
      const Segment first =
          ctas > 0 ? share_item(p_, static_cast<int>(blockIdx.x) >> p_.cluster_shift, worker(), ctas * warps)
                   : plan_worker(p_.call, p_.split, worker(), [&](int batch, int token, bool padding) {
                       write_blind_token(p_.call, batch, token, padding);
                     });
      if (threadIdx.x % 32 == 0) {
        mine_.segment = mine_.loaded = first;
        mine_.more = mine_.complete = true;
      }
      __syncwarp();
    }
    CodeStream<D, kTiles> stream(p_, mine_, shared_);
    const int ring = warp() * kStages;
    int buffer = 0;  // of the ring

    for (bool first_segment = true; first_segment || mine_.segment.given(); first_segment = false) {
      Queries<D, kTiles> q;
      LaneStates<kTiles> state;
      float acc[kTiles][kAcc][4];
      // Before the first segment the ring is filled, in turns with negative numbers.
      tiles_ = first_segment ? 1 - kStages : 0;
#pragma unroll 1
      while (true) {
        if (tiles_ == 0) [[unlikely]] {
          if (first_segment) {
            fill_table(shared_);
            __syncthreads();
          }
          begin_segment();
          state.clear();
#pragma unroll
          for (int i = 0; i < kTiles * kAcc * 4; ++i) acc[i / 4 / kAcc][i / 4 % kAcc][i % 4] = 0;
          if (tiles_ == 0) break;
          q.prepare(p_, mine_.segment, mine_.item, rests_of_warp<D, kTiles>(shared_, warp()));
          if constexpr (kTiles == 2) publish(mine_.reach, q.reach);
        }
        ptx::cp_async_wait<kStages - 2>();
        __syncwarp();  // the tile is there, and nobody reads the one before it any more
        stream.load_next(p_, ring + buffer);
        buffer = buffer + 1 == kStages ? 0 : buffer + 1;
        if (tiles_ < 0) [[unlikely]] {
          ++tiles_;
          continue;
        }
        attend_tile(ring + buffer, q, rests_of_warp<D, kTiles>(shared_, warp()), state, acc);
        if (--tiles_ == 0) break;
      }
      const Segment& segment = mine_.segment;
      if (!segment.given()) break;
      constexpr float kUnit = kLevelUnit<Tile::kWidth>;
      if (ctas > 0) {
        __syncwarp();  // what is parked overwrites the last tile, which every lane has read
        const ParkedCodes<D> parked(p_, shared_);
        const int own = warp();
        write_results<D, kTiles>(
            mine_.item.rows, state, acc, kUnit, [&](int row, const auto& x) { parked.state(own, row) = x; },
            [&](int row, int column, float4 x) { parked.values(own, row, column) = x; });
        break;
      }
      const int slot = slot_of(p_, segment, worker(), first_segment);
      write_results<D, kTiles>(
          mine_.item.rows, state, acc, kUnit, [&](int row, const auto& x) { p_.partials.state(slot, row) = x; },
          [&](int row, int column, float4 x) { *reinterpret_cast<float4*>(p_.partials.row(slot, row) + column) = x; });
      publish(mine_.segment, next_segment(p_.call, p_.split, segment));
    }
    if (ctas == 0) return;
    const int rank = static_cast<int>(blockIdx.x) & (ctas - 1);
    const int shares = min_of(mine_.segment.sequence.units, ctas * warps);  // of which every ctas-th is here
    merge_parked<D>(p_, mine_.segment, mine_.item, ParkedCodes<D>(p_, shared_),
                    (shares - rank + ctas - 1) >> p_.cluster_shift, rank);
  }

 private:
  // Read anew where they are needed: the main loop is short of registers.
  static __device__ __forceinline__ int warp() { return ptx::fresh_thread() / 32; }
  // Whose share of the plan is this warp's. Neighbouring shares lie on different multiprocessors: a few of them do not
  // crowd on one.
  __device__ __forceinline__ int worker() const {
    const auto cta = static_cast<int>(blockIdx.x);
    return p_.cluster_ctas > 0 ? warp() * p_.cluster_ctas + (cta & (p_.cluster_ctas - 1))
                               : warp() * static_cast<int>(gridDim.x) + cta;
  }

  // What the rows are, which keys they see, and which of them all see.
  __device__ __forceinline__ void begin_segment() {
    const Segment& segment = mine_.segment;
    publish(mine_.item, ItemRows(p_.call, p_.split, segment));
    const ItemRows& item = mine_.item;
    const Mask mask = segment.sequence.mask(p_.call.score);
    const ExactRanges exact(p_, segment, item);
    const auto in_item = [&](int64_t key) { return static_cast<int>(clamp(key, item.begin, item.end)); };
    constexpr int kTokens = Tile::kTokens;
    const int end = (item.end + kTokens - 1) / kTokens * kTokens;
    tiles_ = segment.given() ? (end - (item.begin & -kTokens)) / kTokens : 0;
    const int clear_begin = max_of(in_item(mask.visible(item.last_query).begin), exact.lead_end);
    const int clear_end = min_of(in_item(mask.visible(item.first_query).end), exact.recent_begin);
    const int behind = divide_down(end - clear_end + kTokens - 1, kTokens);
    const int count = mine_.complete ? max_of(divide_down(end - clear_begin, kTokens) - behind, 0) : 0;
    publish(mine_.clear, ClearTiles{behind, count});
  }
  // The first token of the tile.
  __device__ __forceinline__ int first_token() const {
    return ((mine_.item.end + Tile::kTokens - 1) / Tile::kTokens - tiles_) * Tile::kTokens;
  }

  __device__ __forceinline__ void attend_tile(int buffer, const Queries<D, kTiles>& q, const unsigned char* rests,
                                              LaneStates<kTiles>& state, float (&acc)[kTiles][kAcc][4]) const {
    const uint32_t k_at = k_lane_ + buffer * 2 * Tile::kBytes, v_at = v_lane_ + buffer * 2 * Tile::kBytes;

    float s[Tile::kProducts][kTiles][4] = {};
    constexpr int kAtOnce = kTiles == 1 ? Tile::kProducts : 1;  // products, as registers allow
#pragma unroll
    for (int first = 0; first < Tile::kProducts; first += kAtOnce) {
      KeyCodes<D> keys[kAtOnce];
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) keys[j].read(shared_, k_at, first + j);
#pragma unroll
      for (int i = 0; i < Tile::kSteps; ++i)
#pragma unroll
        for (int j = 0; j < kAtOnce; ++j) {
          uint32_t a[4];
          keys[j].operand(shared_, lane4_, i, a);
          const int block = Tile::kBlocks == 2 ? first + j : 0;
#pragma unroll
          for (int n = 0; n < kTiles; ++n)
            ptx::mma_16x8x16<Float16>(s[first + j][n], a, q.word[n][block][2 * i], q.word[n][block][2 * i + 1]);
        }
    }
    const ClearTiles range = mine_.clear;
    const bool clear = static_cast<uint32_t>(tiles_ - 1 - range.behind) < static_cast<uint32_t>(range.count);
    uint32_t hidden = 0;
    if (!clear) [[unlikely]]
      hidden = find_hidden(mine_.complete);
    float k_norm[Weights::kNorms], v_norm[Weights::kNorms];
    bool rough = read_norms(buffer, reach_of(q), clear, hidden, k_norm, v_norm), raised = false;

    Weights weights;
#pragma unroll 1
    while (true) {
      typename Weights::Scores x;
#pragma unroll
      for (int n = 0; n < kTiles; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          if constexpr (Tile::kBlocks == 2) {
            x[0][n][i] = fmaf(s[0][n][i], k_norm[i / 2 * 2], s[1][n][i] * k_norm[i / 2 * 2 + 1]);
          } else {
#pragma unroll
            for (int j = 0; j < Tile::kGroups; ++j) x[j][n][i] = s[j][n][i] * k_norm[2 * j + i / 2];
          }
        }
      float factor[kTiles][2];
#pragma unroll
      for (int i = 0; i < 2 * kTiles; ++i) factor[i / 2][i % 2] = q.factor[i / 2][i % 2];
      if (!p_.straight) [[unlikely]]
        finish_scores(buffer, x, factor);
      const bool raise = weights.compute(x, factor, v_norm, clear, hidden, state);
      if (!__any_sync(~0u, (raise && !raised) || rough)) [[likely]] {
#pragma unroll
        for (int i = 0; i < 2 * kTiles; ++i) state.sum[i / 2][i % 2] += weights.sum[i / 2][i % 2];
        add_values(v_at, weights, acc);
        return;
      }
      if (__any_sync(~0u, rough)) {
        float largest = 0;
#pragma unroll
        for (int i = 0; i < Weights::kNorms; ++i) {
          k_norm[i] += k_norm[i] - k_norm[i];  // an infinite one decodes to +-Inf, whose sum is NaN
          largest = fmaxf(largest, fabsf(k_norm[i]));
        }
        const bool levels = __any_sync(~0u, !(largest * reach_of(q) <= kReachOfLevels));
        add_rest<D, kTiles>(shared_, rests, k_at, lane4_, levels, q, s);
        rough = false;
      } else {
        Weights::raise_bases(x, factor, v_norm, hidden, state, acc);
        raised = true;
      }
    }
  }

  __device__ __forceinline__ void add_values(uint32_t v_at, const Weights& weights,
                                             float (&acc)[kTiles][kAcc][4]) const {
    constexpr int kVWords = Tile::kWidth / 64;  // of 8 codes, that a lane reads of a token's block of V
#pragma unroll
    for (int j = 0; j < Tile::kProducts; ++j) {
      uint32_t p[kTiles][2];
#pragma unroll
      for (int n = 0; n < kTiles; ++n)
#pragma unroll
        for (int h = 0; h < 2; ++h) p[n][h] = ptx::transpose_8x8(weights.packed[j][n][h]);
      Vector<uint32_t, kVWords> row[2][2];  // pieces t and t + 4
#pragma unroll
      for (int h = 0; h < 2; ++h)
#pragma unroll
        for (int c = 0; c < 2; ++c)
          row[h][c] = load<Vector<uint32_t, kVWords>>(shared_ + (v_at ^ Tile::within(j, h) ^ c * 64) +
                                                      Tile::above(j, h) + c * 1024);
#pragma unroll
      for (int w = 0; w < kVWords; ++w) {
        const TokenPair low = pair_tokens(row[0][0].value[w], row[0][1].value[w]);
        const TokenPair high = pair_tokens(row[1][0].value[w], row[1][1].value[w]);
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          const uint32_t a[4] = {expand(shared_, low.even, lane4_, k), expand(shared_, low.odd, lane4_, k),
                                 expand(shared_, high.even, lane4_, k), expand(shared_, high.odd, lane4_, k)};
          const int i = (Tile::kBlocks == 2 ? j * 8 : 0) + w * 4 + k;
#pragma unroll
          for (int n = 0; n < kTiles; ++n) ptx::mma_16x8x16<Float16>(acc[n][i], a, p[n][0], p[n][1]);
        }
      }
    }
  }

  __device__ __forceinline__ float reach_of(const Queries<D, kTiles>& q) const {
    return kTiles == 1 ? q.reach : mine_.reach;  // of two tiles there is no register left for it
  }

  // Norms of this lane's tokens; 0 where no row reads the token. Returns whether scores may be too large for fp16
  // queries.
  __device__ __forceinline__ bool read_norms(int buffer, float reach, bool clear, uint32_t hidden,
                                             float (&k_norm)[Weights::kNorms], float (&v_norm)[Weights::kNorms]) const {
    constexpr int kNorms = Weights::kNorms;
    const unsigned char* at = shared_ + p_.at.norms + buffer * 2 * Tile::kNormBytes +
                              Tile::piece(static_cast<int>(lane4_) / 16) * (kNorms * 2);
    const auto k = load<Vector<uint32_t, kNorms / 2>>(at);
    const auto v = load<Vector<uint32_t, kNorms / 2>>(at + Tile::kNormBytes);
    float largest = 0;
#pragma unroll
    for (int i = 0; i < kNorms; ++i) {
      k_norm[i] = half_to_float(static_cast<uint16_t>(k.value[i / 2] >> (i % 2 * 16)));
      v_norm[i] = half_to_float(static_cast<uint16_t>(v.value[i / 2] >> (i % 2 * 16)));
    }
    if (!clear) [[unlikely]] {
      constexpr uint32_t kAllRows = (1u << 2 * kTiles) - 1;
#pragma unroll
      for (int i = 0; i < kNorms; ++i)
        if ((hidden >> (i / Tile::kBlocks * 2 * kTiles) & kAllRows) == kAllRows) k_norm[i] = v_norm[i] = 0;
    }
#pragma unroll
    for (int i = 0; i < kNorms; ++i) largest = fmaxf(largest, fabsf(k_norm[i]));
    return !(largest * reach <= kReachOfQuery);
  }

  // Row factors, page offsets and the cap: the factors are 1 then.
  __device__ __forceinline__ void finish_scores(int buffer, typename Weights::Scores& x,
                                                float (&factor)[kTiles][2]) const {
    const int lane = ptx::fresh_lane(), t = lane % 4, piece = Tile::piece(lane / 4);
    const unsigned char* offsets = nullptr;  // what they add to this lane's rows 2 t and 2 t + 1, of its first token
    int of_token = 0;                        // bytes from those of a token to those of the next
    if (p_.call.kv.k_offsets) {
      const int first = p_.whole_groups ? piece / (8 / Tile::kGroups) : piece * Tile::kPerLane;
      of_token = p_.whole_groups ? 0 : kOffsetBytes<kTiles>;
      offsets = shared_ + p_.at.offsets + buffer * p_.offset_bytes + first * kOffsetBytes<kTiles> + t * 8;
    }
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
#pragma unroll
      for (int j = 0; j < Tile::kGroups; ++j)
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          Vector<float, 2> part{};
          if (offsets) part = load<Vector<float, 2>>(offsets + (2 * j + h) * of_token + n * 32);
#pragma unroll
          for (int c = 0; c < 2; ++c) {
            float& y = x[j][n][2 * h + c];
            y = finish_score(p_.rule, fmaf(y, factor[n][c], part.value[c]));
          }
        }
#pragma unroll
      for (int c = 0; c < 2; ++c) factor[n][c] = 1;
    }
  }

  // One bit for each of the lane's tokens and rows: the row does not read the token from the codes. `complete`: all
  // tokens that some row sees are there.
  __device__ __forceinline__ uint32_t find_hidden(bool complete) const {
    const int lane = ptx::fresh_lane(), g = lane / 4, t = lane % 4;
    const ItemRows& item = mine_.item;
    const ExactRanges exact(p_, mine_.segment, item);
    const ExactRule rule{p_.call.kv.exact_first, p_.call.kv.exact_last};
    const Mask mask = mine_.segment.sequence.mask(p_.call.score);
    const int sequence = mine_.segment.sequence.batch;
    uint32_t hidden = 0;
#pragma unroll 1
    for (int i = 0; i < Tile::kPerLane; ++i) {
      const int token = first_token() + Tile::piece(g) * Tile::kPerLane + i;
      const bool seen = token >= item.begin && token < item.end;
      const bool there = seen && (complete || plane_row(p_, sequence, item.kv_head, token).row >= 0);
      const bool held =
          seen && (token < exact.lead_end || token >= exact.recent_begin) && exact_page(p_, sequence, token) >= 0;
#pragma unroll 1
      for (int k = 0; k < 2 * kTiles; ++k) {
        const int row = k / 2 * 8 + 2 * t + k % 2;
        const int query = p_.split.group.quotient(item.first_row + min_of(row, item.rows - 1));
        const KeyRange keys = mask.visible(query);
        const bool reads = there && token >= keys.begin && token < keys.end &&
                           !(held && (token < exact.lead_end || token >= rule.recent(mask, query).begin));
        if (!reads) hidden |= 1u << (i * 2 * kTiles + k);
      }
    }
    return hidden;
  }

  // Keeps what follows from the lane's number in a register, if there are enough: else it is worked out again for every
  // tile.
  static __device__ __forceinline__ uint32_t keep(uint32_t x) {
    if constexpr (kTiles == 1) asm volatile("" : "+r"(x));
    return x;
  }

  const CodeParams& p_;
  unsigned char* shared_;
  uint32_t lane4_, k_lane_, v_lane_;  // 4 * lane; where this lane's codes of K and V are in the first buffer
  CodeSegments& mine_;
  int tiles_ = 0;  // that the segment has left, this one included
};

template <int D, int kTiles, int kWarps>
__global__ void __launch_bounds__(kWarps * 32, 1) code_attention_kernel(const __grid_constant__ CodeParams p) {
  extern __shared__ __align__(1024) unsigned char shared[];
  CodeKernel<D, kTiles>(p, shared).run();
}

}  // namespace flashq::cuda
