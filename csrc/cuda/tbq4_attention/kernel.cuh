// Split-KV attention over a TBQ4 cache: few rows, many keys, so it is bound by the read of codes and norms.
//
// Every warp streams a share of the plan (decode/plan.cuh) of its own and, once queries have been rotated, knows
// nothing of the others. Outputs stay rotated until partial results have been merged, and norms multiply scores and
// weights, so that a value costs one table read for two. Codes are the left operands of mma.m16n8k16, rows are columns:
//   S^T (16 tokens, 8 rows) = C_k (16, block) Q'^T (block, 8),   O'^T (block, 8) += C_v^T (block, 16) P^T (16, 8).
// Keys of the exact pool are left out: other blocks compute them (exact_tokens.cuh).
#pragma once
#include "cuda/ptx/dependent_launch.cuh"
#include "cuda/tbq4_attention/exact_tokens.cuh"
#include "cuda/tbq4_attention/launch.h"
#include "cuda/tbq4_attention/results.cuh"
#include "cuda/tbq4_attention/scores.cuh"
#include "cuda/tbq4_attention/slots.cuh"
#include "cuda/tbq4_attention/warp.cuh"

namespace flashq::cuda {

// kTiles: 8-row tiles of an item.
template <int D, int kTiles> class CodeKernel : CodeWarp<D, kTiles> {
  using Base = CodeWarp<D, kTiles>;
  using Base::p_, Base::shared_, Base::mine_, Base::tiles_;
  using Base::page_scores, Base::score_entries, Base::score_scattered;
  using Base::scales_of, Base::rotate_queries;
  using Base::warp, Base::worker, Base::begin_segment, Base::first_token, Base::find_hidden;
  using Tile = CodeTile<D>;
  using Weights = TileWeights<D, kTiles>;
  static constexpr int kStages = kCodeStages;
  static constexpr int kAcc = D / 16;  // fragments of the outputs of 8 rows
  // Whether the plan is made before the kernel before this one has ended: 3 % faster, where blocks of 8 warps are up to
  // 3 % slower.
  static constexpr bool kEarly = most_code_warps(D, kTiles) > 8;

 public:
  __device__ __forceinline__ CodeKernel(const CodeParams& p, unsigned char* shared) : Base(p, shared) {
    const uint32_t lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    lane4_ = keep(lane * 4);
    k_lane_ = keep(Tile::swizzle(Tile::piece(g) * 256 + t * (Tile::kWords * 4)));
    v_lane_ = keep(Tile::kBytes + Tile::swizzle(t * 256 + g * (Tile::kWidth / 16)));
    norm_lane_ = keep(2 * Tile::kBytes + Tile::piece(g) * (Weights::kNorms * 2));
  }

  __device__ __forceinline__ void run() {
    const int ctas = p_.cluster_ctas, warps = static_cast<int>(blockDim.x) / 32;
    fill_table(shared_);  // needs nothing of the kernels before
    const auto batch = static_cast<int>(p_.call.query.batch);
    const bool streams = !p_.exact || static_cast<int>(blockIdx.x) < p_.code_ctas;
    const bool early = kEarly && streams && ctas == 0 && p_.whole_groups && !p_.call.query.cu_seqlens_q.given() &&
                       batch <= kRingBytes<D> / int{sizeof(SequenceKeys)};
    bool started = false;
    const auto start = [&] {
      ptx::wait_for_primary();
      ptx::allow_dependents();  // not before: the merge relies on what was written before this kernel
      started = true;
    };
    if (!early) start();
    // The kernel before this one may still run: the plan is made meanwhile and the first tiles are looked up, once more
    // if it has changed what they rest on.
    auto* const keys =
        reinterpret_cast<SequenceKeys*>(shared_ + kPairTableBytes + warp() * kRingBytes<D>);  // of all sequences
    const auto keys_now = [&](int b) {  // past the L1, which may hold what was there before the kernel before this one
      return read_keys(p_.call, p_.split, b, [](const IndexView& view, int i) { return load_past_l1(view, i); });
    };
    bool blind = false;
    // Puts the first share of the plan into `mine`.
    const auto plan = [&](const AttentionParams& call) {
      const Segment first =
          ctas > 0 ? share_item(p_, static_cast<int>(blockIdx.x) >> p_.cluster_shift, worker(), ctas * warps)
                   : plan_worker(call, p_.split, worker(), [&](int batch, int token, bool padding) {
                       if (!kEarly || started)
                         write_blind_token(p_.call, batch, token, padding);
                       else
                         blind = true;
                     });
      __syncwarp();
      if (threadIdx.x % 32 == 0) {
        mine_.loaded.segment = first;
        mine_.complete = true;
        mine_.left = mine_.entered = mine_.begun = 0;
      }
      __syncwarp();
    };
    if (early) {
      CodeStream<D, kEarly> stream(p_, mine_, shared_);
      AttentionParams call = p_.call;
      call.seqlens = {.data = &keys->end, .stride = {2, 0}, .is_int64 = false};
      call.kv_start = {.data = &keys->start, .stride = {2, 0}, .is_int64 = false};
#pragma unroll 1
      while (true) {
#pragma unroll 1
        for (int b = ptx::fresh_lane(); b < batch; b += 32) keys[b] = keys_now(b);
        __syncwarp();
        plan(call);
        stream.look_ahead(p_);
        if (started) break;
        start();
        bool outdated = blind || stream.outdated(p_);
#pragma unroll 1
        for (int b = ptx::fresh_lane(); b < batch; b += 32) outdated |= !(keys[b] == keys_now(b));
        if (!__any_sync(~0u, outdated)) break;
      }
    } else {
      plan(p_.call);
      if (!streams) {
        attend_exact<D>(p_);
        return;
      }
    }
    __syncwarp();  // the ring takes the place of the keys
    CodeStream<D, kEarly> stream(p_, mine_, shared_);
    stream.pin();
    if (early) stream.resume();
    const uint32_t ring = kPairTableBytes + warp() * kRingBytes<D>, last_slot = ring + (kStages - 1) * Tile::kSlotBytes;
    uint32_t slot = ring;  // of the next tile to load, and then of the one to compute
    Queries<D, kTiles> q;
    LaneStates<kTiles> state;
    float acc[kTiles][kAcc][4];
    tiles_ = 1 - kStages;  // before the first segment the ring is filled, in turns with negative numbers

#pragma unroll 1
    while (true) {
      ptx::cp_async_wait<kStages - 2>();
      __syncwarp();  // the tile is there, and nobody reads the one before it any more
      stream.load_next(p_, slot);
      slot = slot == last_slot ? ring : slot + Tile::kSlotBytes;
      if (tiles_ > 0) [[likely]] {
        attend_tile(slot, q, state, acc);
        if (--tiles_ > 0) [[likely]]
          continue;
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
        const int own = slot_of(p_, mine_.segment, worker(), mine_.begun == 1);
        write_results<D, kTiles>(
            mine_.item.rows, state, acc, kUnit, [&](int row, const auto& x) { p_.partials.state(own, row) = x; },
            [&](int row, int column, float4 x) { *reinterpret_cast<float4*>(p_.partials.row(own, row) + column) = x; });
      } else if (++tiles_ < 0) {
        continue;
      }
      begin_segment();
      const bool first = mine_.begun == 1;
      if (first) __syncthreads();  // what the warps begin with is there, and the table
      const int from = rotate_queries(first);
      if (first) __syncthreads();
      q.read(queries_of_warp<D, kTiles>(shared_, from), scales_of(from), mine_.item.rows);
      if (first) __syncthreads();
      if (tiles_ == 0) break;
      publish(mine_.rests, false);
      state.clear();
#pragma unroll
      for (int i = 0; i < kTiles * kAcc * 4; ++i) acc[i / 4 / kAcc][i / 4 % kAcc][i % 4] = 0;
    }
    if (ctas == 0) return;
    const int rank = static_cast<int>(blockIdx.x) & (ctas - 1);
    const int shares = min_of(mine_.segment.sequence.units, ctas * warps);  // of which every ctas-th is here
    merge_parked<D>(p_, mine_.segment, mine_.item, ParkedCodes<D>(p_, shared_),
                    (shares - rank + ctas - 1) >> p_.cluster_shift, rank);
  }

 private:
  // Norms of this lane's tokens.
  struct Norms {
    float k[Weights::kNorms], v[Weights::kNorms];

    __device__ __forceinline__ explicit Norms(const unsigned char* at) {
      constexpr int kWords = Weights::kNorms / 2;
      const auto of_k = load<Vector<uint32_t, kWords>>(at);
      const auto of_v = load<Vector<uint32_t, kWords>>(at + Tile::kNormBytes);
#pragma unroll
      for (int i = 0; i < Weights::kNorms; ++i) {
        k[i] = half_to_float(static_cast<uint16_t>(of_k.value[i / 2] >> (i % 2 * 16)));
        v[i] = half_to_float(static_cast<uint16_t>(of_v.value[i / 2] >> (i % 2 * 16)));
      }
    }
    // Magnitude of those of K; NaN if one of them is NaN.
    __device__ __forceinline__ float largest() const {
      float largest = 0;
#pragma unroll
      for (float x : k) largest = fmaxf(largest, fabsf(x));
      return largest;
    }
  };

  using Scores = typename Weights::Scores;
  using Factors = float[kTiles][2];

  __device__ __forceinline__ void attend_tile(uint32_t slot, const Queries<D, kTiles>& q, LaneStates<kTiles>& state,
                                              float (&acc)[kTiles][kAcc][4]) {
    const ClearTiles range = mine_.range;
    const uint32_t k_at = k_lane_ + slot;
    constexpr bool kAtOnce = kTiles == 1;  // all codes of K, as registers allow
    KeyCodes<D> keys[kAtOnce ? Tile::kProducts : 1];
    if constexpr (kAtOnce) {
#pragma unroll
      for (int j = 0; j < Tile::kProducts; ++j) keys[j].read(shared_, k_at, j);
    }
    Norms norm(shared_ + slot + norm_lane_);
    const bool clear = static_cast<uint32_t>(tiles_ - 1 - range.behind) < static_cast<uint32_t>(range.count);
    uint32_t hidden = 0;
    if (!clear) [[unlikely]] {
      hidden = find_hidden(mine_.complete);
      constexpr uint32_t kAllHidden = ~0u >> (32 - Tile::kPerLane * 2 * kTiles);
      if (__all_sync(~0u, hidden == kAllHidden)) return;
      constexpr uint32_t kAllRows = (1u << 2 * kTiles) - 1;
#pragma unroll
      for (int i = 0; i < Weights::kNorms; ++i)
        if ((hidden >> (i / Tile::kBlocks * 2 * kTiles) & kAllRows) == kAllRows) norm.k[i] = norm.v[i] = 0;
    }
    float s[Tile::kProducts][kTiles][4] = {};
    if (!__any_sync(~0u, !(norm.largest() * q.reach <= kReachOfQuery<D>))) [[likely]]
      multiply_keys<false>(keys, k_at, q, nullptr, s);
    else
      multiply_with_rests(keys, k_at, q, norm, s);

    Scores x;
    Factors factor;
    finish_scores(s, norm, q, x, factor);
    Weights weights;
#pragma unroll 1
    for (bool raised = false;; raised = true) {
      bool raise;
      if (clear) [[likely]]
        raise = weights.template compute<false>(x, factor, norm.v, 0, state);
      else
        raise = weights.template compute<true>(x, factor, norm.v, read_anew(hidden), state);
      if (!__any_sync(~0u, raise && !raised)) [[likely]]
        break;
      Weights::raise_bases(x, factor, norm.v, read_anew(hidden), state, acc);
    }
#pragma unroll
    for (int i = 0; i < 2 * kTiles; ++i) state.sum[i / 2][i % 2] += weights.sum[i / 2][i % 2];
    add_values(v_lane_ + slot, weights, acc);
  }

  // kRests: with what fp16 has left out of the queries.
  template <bool kRests, int kKeys>
  __device__ __forceinline__ void multiply_keys(KeyCodes<D> (&keys)[kKeys], uint32_t k_at, const Queries<D, kTiles>& q,
                                                const unsigned char* rests,
                                                float (&s)[Tile::kProducts][kTiles][4]) const {
#pragma unroll
    for (int first = 0; first < Tile::kProducts; first += kKeys) {
      if constexpr (kKeys == 1) keys[0].read(shared_, k_at, first);
      typename Queries<D, kTiles>::Words left;
      if constexpr (kRests) Queries<D, kTiles>::read_words(rests, mine_.item.rows, left);
      float rest[kKeys][kTiles][4] = {};  // apart: it is smaller than the last bits of the products
#pragma unroll
      for (int i = 0; i < Tile::kSteps; ++i) {
#pragma unroll
        for (int j = 0; j < kKeys; ++j) {
          uint32_t a[4];
          keys[j].operand(shared_, lane4_, i, a);
          const int block = Tile::kBlocks == 2 ? first + j : 0;
#pragma unroll
          for (int n = 0; n < kTiles; ++n) {
            ptx::mma_16x8x16<Float16>(s[first + j][n], a, q.word[n][block][2 * i], q.word[n][block][2 * i + 1]);
            if constexpr (kRests)
              ptx::mma_16x8x16<Float16>(rest[j][n], a, left[n][block][2 * i], left[n][block][2 * i + 1]);
          }
        }
      }
      if constexpr (kRests) {
#pragma unroll
        for (int i = 0; i < kKeys * kTiles * 4; ++i)
          s[first + i / 4 / kTiles][i / 4 % kTiles][i % 4] += rest[i / 4 / kTiles][i / 4 % kTiles][i % 4];
      }
    }
  }
  template <int kKeys>
  __device__ __forceinline__ void multiply_with_rests(KeyCodes<D> (&keys)[kKeys], uint32_t k_at,
                                                      const Queries<D, kTiles>& q, Norms& norm,
                                                      float (&s)[Tile::kProducts][kTiles][4]) const {
#pragma unroll
    for (int i = 0; i < Weights::kNorms; ++i)
      norm.k[i] += norm.k[i] - norm.k[i];  // an infinite one decodes to +-Inf, whose sum is NaN
    unsigned char* const rests = queries_of_warp<D, kTiles>(shared_, warp());
    if (!mine_.rests) {
      QueryRotation<D>::template rotate<true>(p_, mine_, 0, 1, rests, nullptr);
      publish(mine_.rests, true);
    }
    multiply_keys<true>(keys, k_at, q, rests, s);
    if (__any_sync(~0u, !(norm.largest() * q.reach <= kReachOfLevels))) add_level_rests(shared_, k_at, lane4_, q, s);
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

  // Scores are x * factor.
  __device__ __forceinline__ void finish_scores(const float (&s)[Tile::kProducts][kTiles][4], const Norms& norm,
                                                const Queries<D, kTiles>& q, Scores& x, Factors& factor) const {
#pragma unroll
    for (int n = 0; n < kTiles; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if constexpr (Tile::kBlocks == 2) {
          x[0][n][i] = fmaf(s[0][n][i], norm.k[i / 2 * 2], s[1][n][i] * norm.k[i / 2 * 2 + 1]);
        } else {
#pragma unroll
          for (int j = 0; j < Tile::kGroups; ++j) x[j][n][i] = s[j][n][i] * norm.k[2 * j + i / 2];
        }
      }
#pragma unroll
    for (int i = 0; i < 2 * kTiles; ++i) factor[i / 2][i % 2] = q.factor[i / 2][i % 2];
    if (!p_.straight) [[unlikely]]
      add_offsets(x, factor);
  }

  // Page offsets and the cap: the factors are 1 then.
  __device__ __forceinline__ void add_offsets(Scores& x, Factors& factor) const {
    if (p_.page_scores) {
      add_page_scores(x, factor);
    } else if (p_.call.kv.k_offsets) {
      add_scattered(x, factor);
    } else {
#pragma unroll
      for (int i = 0; i < Tile::kGroups * kTiles * 4; ++i)
        x[i / 4 / kTiles][i / 4 % kTiles][i % 4] *= factor[i / 4 % kTiles][i % 2];
    }
#pragma unroll
    for (int i = 0; i < 2 * kTiles; ++i) factor[i / 2][i % 2] = 1;
    if (!p_.curved) return;
#pragma unroll
    for (int i = 0; i < Tile::kGroups * kTiles * 4; ++i) {
      float& y = x[i / 4 / kTiles][i / 4 % kTiles][i % 4];
      y = finish_score(p_.rule, y);
    }
  }

  // What the offset of the page of this lane's tokens adds; worked out for kOffsetPages entries of the table at once.
  __device__ __forceinline__ void add_page_scores(Scores& x, const Factors& factor) const {
    const int lane = static_cast<int>(lane4_) / 4;
    const ClearTiles range = mine_.range;
    const int first = range.end - tiles_ * Tile::kTokens;
    if (first + Tile::kTokens > range.scored) [[unlikely]]
      score_entries(first);
    const int token = first + Tile::piece(lane / 4) * Tile::kPerLane;
    const int entry = p_.page_size.quotient(token) - mine_.first_entry;
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
      const auto two =
          load<Vector<float, 2>>(page_scores() + entry * kOffsetBytes<kTiles> + (8 * n + 2 * (lane % 4)) * 4);
#pragma unroll
      for (int j = 0; j < Tile::kGroups; ++j)
#pragma unroll
        for (int i = 0; i < 4; ++i) x[j][n][i] = fmaf(x[j][n][i], factor[n][i % 2], two.value[i % 2]);
    }
  }
  // The same of tokens of any pages.
  __device__ __forceinline__ void add_scattered(Scores& x, const Factors& factor) const {
    const int first = first_token() + Tile::piece(ptx::fresh_lane() / 4) * Tile::kPerLane;
#pragma unroll
    for (int j = 0; j < Tile::kGroups; ++j) {
      const auto part = score_scattered(p_, mine_, first + 2 * j);
#pragma unroll
      for (int n = 0; n < kTiles; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) x[j][n][i] = fmaf(x[j][n][i], factor[n][i % 2], part.s[n][i]);
    }
  }
  // What is made of it is made where it is used, not for every tile ahead of a loop that hardly needs it.
  static __device__ __forceinline__ uint32_t read_anew(uint32_t x) {
    asm volatile("" : "+r"(x));
    return x;
  }
  // Keeps what follows from the lane's number in a register: else it is worked out again for every tile.
  static __device__ __forceinline__ uint32_t keep(uint32_t x) {
    asm volatile("" : "+r"(x));
    return x;
  }

  uint32_t lane4_;                        // 4 * lane
  uint32_t k_lane_, v_lane_, norm_lane_;  // where this lane's codes and norms are in a slot
};

template <int D, int kTiles>
__global__ void __launch_bounds__(most_code_warps(D, kTiles) * 32, 1)
    code_attention_kernel(const __grid_constant__ CodeParams p) {
  extern __shared__ __align__(1024) unsigned char shared[];
  CodeKernel<D, kTiles>(p, shared).run();
}

}  // namespace flashq::cuda
