// A consumer warpgroup: 64 query rows against the tiles of keys that the producers expand.
//
//   S (64 x kTileK) = Q' C_k^T, times the keys' norms: scores.  P = 2^(scores - base), sums in fp32.
//   O' (64 x kDim) += (P times the values' norms, in fp16) C_v, rotated back at the end.
//
// A row's base is raised when a weight times its norm may leave fp16, not when a score exceeds the largest: so what a
// row looks at keeps its bits beside norms that it does not look at. Weights are first tried with the base as it is.
#pragma once
#include "cuda/ptx/barrier.cuh"
#include "cuda/ptx/tma.cuh"
#include "cuda/ptx/wgmma.cuh"
#include "cuda/tbq4_attention/scores.cuh"
#include "cuda/tbq4_prefill/finish_tile.cuh"

namespace flashq::cuda::tbq4_sm90 {

// log2 of the largest weight after its row's base is raised. Weights below 2^-25 are lost: 262,144 of them are 2^-11 of
// it. The base of a row comes from its first keys, which may be few: with 2^11 more to grow to, it is seldom raised
// again, for which the other warps wait (of 4096 tokens an eighth of the time, with 2^7 more).
inline constexpr float kFresh = 4;

// tanh without branches, off by 3e-7: the hardware's, off by 5e-4, would use up the tolerance.
__device__ __forceinline__ float smooth_tanh(float x) {
  const float square = x * x;
  const float small =
      x * fmaf(square, fmaf(square, fmaf(square, fmaf(square, 62.f / 2835, -17.f / 315), 2.f / 15), -1.f / 3), 1);
  const float e = ptx::exp2_approx(fabsf(x) * (-2 * kLog2E));
  return fabsf(x) < 0.3f ? small : copysignf(__fdividef(1 - e, 1 + e), x);
}

// From shared memory. Volatile: what an earlier load of the same has brought is not kept for it in registers.
__device__ __forceinline__ float4 load_again(uint32_t from) {
  float4 x;
  asm volatile("ld.volatile.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w)
               : "r"(from));
  return x;
}
__device__ __forceinline__ float4 load_again(const float* from) { return load_again(ptx::shared_address(from)); }

template <class C> class Consumer {
  static constexpr int kTileK = C::kTileK, kDim = C::kDim;
  using Info = KeyTile<kTileK>;

 public:
  __device__ __forceinline__ Consumer(const Params& p, typename C::SharedMemory& shared)
      : p_(p), shared_(shared), wg_(__shfl_sync(~0u, (static_cast<int>(threadIdx.x) - 32 * C::kProducers) / 128, 0)) {}

  __device__ __forceinline__ void run() {
    if (wg_ == C::kConsumers - 1) pass_turn();  // warpgroup 0 starts
    while (true) {
      shared_.tile_full[tiles_.at()].wait(tiles_.parity());
      const Tile& tile = shared_.tile[tiles_.at()];
      if (tile.row == sm90::kNoTile) return;
      begin_rows(tile);
      if (tile.first < tile.end) {
        attend(tile);
        tiles_.advance_q();
      }
      __syncwarp();
      finish_output();
      finish_tile<C>(p_, tile, first_row(tile), !own_missing(), o_, {{base_[0], base_[1]}, {sum_[0], sum_[1]}});
      __syncwarp();
      shared_.tile_empty[tiles_.at()].arrive();
      tiles_.advance();
    }
  }

 private:
  __device__ __forceinline__ void take_turn() const { ptx::named_barrier_sync(C::turn_barrier(wg_), 256); }
  __device__ __forceinline__ void pass_turn() const {
    ptx::named_barrier_arrive(C::turn_barrier((wg_ + 1) % C::kConsumers), 256);
  }
  // Of a thread's columns: where what S is multiplied by is in shared memory, and whether page offsets are still to be
  // added.
  struct Columns {
    uint32_t factor;
    bool offsets;
  };
  // Columns 8 j + 2 t + e are the thread's: t.
  __device__ __forceinline__ static int own_columns() { return static_cast<int>(threadIdx.x) % 4; }

  // What is known of the tile.
  __device__ __forceinline__ const Info& info() const { return shared_.info[rings_.info().at()]; }

  __device__ __forceinline__ void begin_rows(const Tile& tile) {
    base_[0] = base_[1] = kLowestBase;
    sum_[0] = sum_[1] = 0;
    own_poison() = 0;
#pragma unroll
    for (float& x : o_) x = 0;
    own_missing() = false;
#pragma unroll
    for (int h = 0; h < 2; ++h) row_factors(h) = p_.rows[scratch_row(tile, h)].factors;
    __syncwarp();
  }
  __device__ __forceinline__ int first_row(const Tile& tile) const { return tile.row + wg_ * C::kRows; }
  __device__ __forceinline__ bool& own_missing() const {
    return shared_.missing[static_cast<uint32_t>(ptx::fresh_thread()) / 32 - C::kProducers];
  }
  // Of a row of the thread; in shared memory, because registers are scarce.
  __device__ __forceinline__ RowFactors& row_factors(int h) const {
    const auto thread = static_cast<uint32_t>(ptx::fresh_thread());  // unsigned: divisions are shifts
    return shared_.row_factors[thread % 256 / 32 * 16 + thread % 32 / 4 + 8 * h];
  }
  // Where a row of the thread is in the scratch; rows past the last one are read as that.
  __device__ __forceinline__ int64_t scratch_row(const Tile& tile, int h) const {
    const int row = first_row(tile) + sm90::row_of_thread(ptx::fresh_thread()) + 8 * h;
    const int query = min(row >> p_.schedule.pack_log2, tile.q_len - 1);
    const int head = (tile.head << p_.schedule.pack_log2) + (row & ((1 << p_.schedule.pack_log2) - 1));
    return row_of(p_, tile, query, head);
  }

  __device__ __forceinline__ void issue_scores(bool fresh) {
    const uint64_t q = ptx::matrix_descriptor(&shared_.q[wg_], 16);
    const uint64_t k = ptx::matrix_descriptor(&shared_.k[rings_.k().at()], 16);
    ptx::pin(s_);
    ptx::wgmma_fence();
#pragma unroll
    for (int d = 0; d < kDim / 16; ++d)  // a box holds four steps
      ptx::Wgmma<kTileK>::template ss<Float16>(s_, q + (d / 4 * sizeof shared_.q[0][0] + d % 4 * 32) / 16,
                                               k + (d / 4 * sizeof shared_.k[0][0] + d % 4 * 32) / 16, !fresh || d > 0);
    if constexpr (C::kOffsets) {
      if (fresh) issue_offsets();
    }
    ptx::wgmma_commit();
  }
  // Raw queries times page offsets, in two sums that lose less.
  __device__ __forceinline__ void issue_offsets() {
    const uint64_t q = ptx::matrix_descriptor(&shared_.raw_q[wg_], 16);
    const uint64_t x = ptx::matrix_descriptor(&shared_.offsets[rings_.offsets().at()], 16);
#pragma unroll
    for (int i = 0; i < 2; ++i) ptx::pin(offset_[i]);
#pragma unroll
    for (int d = 0; d < kDim / 16; ++d)
      ptx::Wgmma<8>::template ss<Float16>(offset_[d % 2], q + (d / 4 * sizeof shared_.q[0][0] + d % 4 * 32) / 16,
                                          x + (d / 4 * 1024 + d % 4 * 32) / 16, d > 1);
  }
  // 16 rows of V are 2048 bytes; a box is kTileK / 16 of them.
  __device__ __forceinline__ void issue_output(int stage) {
    const uint64_t v = ptx::matrix_descriptor(&shared_.v[stage], sizeof shared_.v[0][0]);
    ptx::pin(o_);
    ptx::wgmma_fence();
#pragma unroll
    for (int n = 0; n < kTileK / 16; ++n)
#pragma unroll
      for (int half = 0; half < kDim / kColumns; ++half)
        ptx::Wgmma<kColumns>::template rs<Float16>(*reinterpret_cast<float (*)[kColumns / 2]>(o_ + half * kColumns / 2),
                                                   prob_[n],
                                                   v + (n + half * (kColumns / 64 * kTileK / 16)) * (2048 / 16));
    ptx::wgmma_commit();
  }
  // Of O in a product: of head dim 256 it takes more registers than a thread has at launch, which ptxas refuses.
  static constexpr int kColumns = kDim < 128 ? kDim : 128;
  // Adds to S what rounding queries to fp16, and with kRest keys, has left out; both rare. With kRest S holds the
  // product with that rest, the keys themselves are in the next K buffer, and their large products come last: every
  // step rounds. Leaves the last K buffer of the tile in rings_.k().
  static constexpr int kSteps = kDim / 16, kAtOnce = kDim == 256 || C::kOffsets ? 1 : 4;
  __device__ __forceinline__ void add_rest(const Tile& tile, uint32_t flags) {
    if (flags & kRest) {
      shared_.k_empty[rings_.k().at()].arrive_once();
      rings_.advance_k();
      shared_.k_full[rings_.k().at()].wait(rings_.k().parity());
    }
    if constexpr (kAtOnce > 1) {  // O too: its weights' registers are needed
      ptx::wgmma_wait<0>();
      ptx::pin(o_);
    }
    const uint64_t k = ptx::matrix_descriptor(&shared_.k[rings_.k().at()], 16);
    const int t = static_cast<int>(threadIdx.x) % 4;
#pragma unroll 1
    for (int first = 0; first < kSteps; first += kAtOnce) {
      uint32_t a[kAtOnce][4];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const uint16_t* const row = p_.q_rest + scratch_row(tile, i) * kDim + first * 16 + t * 2;
#pragma unroll
        for (int d = 0; d < kAtOnce; ++d) {
          a[d][i] = load<uint32_t>(row + d * 16);
          a[d][i + 2] = load<uint32_t>(row + d * 16 + 8);
        }
      }
      ptx::pin(s_);
      ptx::wgmma_fence();
#pragma unroll
      for (int d = 0; d < kAtOnce; ++d)
        ptx::Wgmma<kTileK>::template rs<Float16, 0>(s_, a[d],
                                                    k + (first / 4 * sizeof shared_.k[0][0] + (first % 4 + d) * 32) /
                                                            16);
      ptx::wgmma_commit();
      ptx::wgmma_wait<0>();
      ptx::pin(s_);
    }
    if (flags & kRest) {
      issue_scores(false);
      ptx::wgmma_wait<0>();
      ptx::pin(s_);
    }
  }

  // S of a tile and O of the one before it are in flight together. With the first S, O is a product of anything, so
  // that there is one copy of the code: it counts from where its row first has a base.
  __device__ __forceinline__ void attend(const Tile& tile) {
    shared_.q_full[wg_].wait(tiles_.q_parity());
    uint32_t begin = rings_.info().count;  // of the first tile. Not a flag, which would take a register of each thread
    uint32_t flags;
#pragma unroll 1
    do {
      shared_.k_full[rings_.k().at()].wait(rings_.k().parity());
      flags = info().facts.flags;
      take_turn();
      issue_scores(true);
      const auto values = rings_.v(1);
      if (rings_.info().count != begin) shared_.v_full[values.at()].wait(values.parity());
      issue_output(values.at());
      pass_turn();
      // What comes after S is worked out before it is there.
      Columns columns{ptx::shared_address(info().k_norm[own_columns()]), true};
      asm volatile("" : "+r"(columns.factor));
      float4 factor = load_again(columns.factor);
      float unit = info().facts.unit;
      ptx::wgmma_wait<1>();
      ptx::pin(s_);
      if constexpr (C::kOffsets) {
#pragma unroll
        for (int i = 0; i < 2; ++i) ptx::pin(offset_[i]);
      }
      if (flags & (kCoarse | kLast | kIncomplete | kFinish)) {
        if (flags & kCoarse) add_rest(tile, flags);
        if (flags & kLast) shared_.q_empty[wg_].arrive_once();
        if (flags & kIncomplete) own_missing() = true;
        if (flags & kFinish) {
          finish_scores(tile, flags);
          columns = {ptx::shared_address(shared_.ones), false};
        } else {
          columns.factor = ptx::shared_address(info().k_norm[own_columns()]);
        }
        factor = load_again(columns.factor);
        unit = info().facts.unit;
      }
      shared_.k_empty[rings_.k().at()].arrive_once();
      rings_.advance_k();
      weigh(tile, flags, unit, columns, factor, [&] {
        ptx::wgmma_wait<0>();
        ptx::pin(o_);
        if (rings_.info().count != begin) shared_.v_empty[rings_.v(1).at()].arrive_once();
        begin = ~0u;
      });
    } while (!(flags & kLast));
    const auto values = rings_.v(1);
    shared_.v_full[values.at()].wait(values.parity());
    issue_output(values.at());
    ptx::wgmma_wait<0>();
    ptx::pin(o_);
    shared_.v_empty[values.at()].arrive_once();
  }
  // What the page offset of column 8 j adds to the scores of row h. By all lanes.
  __device__ __forceinline__ float offset_of(int j, int h, float factor) const {
    return __shfl_sync(~0u, offset_[0][2 * h + j / 2 % 2] + offset_[1][2 * h + j / 2 % 2], j / 4, 4) * factor;
  }
  // S to scores: norms, row factors, page offsets, the cap and the mask.
  __device__ __forceinline__ void finish_scores(const Tile& tile, uint32_t flags) {
    const int t = static_cast<int>(threadIdx.x) % 4;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const RowFactors factors = row_factors(h);
#pragma unroll
      for (int j = 0; j < kTileK / 8; j += 2) {
        const auto norm = load<float4>(&info().k_norm[t][2 * j]);
        float offset = 0;
        if constexpr (C::kOffsets) {
          const float own = offset_of(j, h, factors.offsets);
          offset = flags & kExact ? 0 : own;
        }
        float* const x = &s_[4 * j + 2 * h];
        const auto finish = [&](float& y, float z) { y = fmaf(y * z, factors.scores, offset); };
        finish(x[0], norm.x);
        finish(x[1], norm.y);
        finish(x[4], norm.z);
        finish(x[5], norm.w);
      }
    }
    if (p_.rule.capped) {
      const float shrink = p_.rule.shrink, gain = p_.rule.gain;
#pragma unroll
      for (float& x : s_) x = smooth_tanh(x * shrink) * gain;
    }
    if (const float last = p_.rule.last; last != 1) {
#pragma unroll
      for (float& x : s_) x *= last;
    }
#pragma unroll
    for (int h = 0; h < 2; ++h)
      mask_scores<kTileK / 4>(find_visible(tile, info(), flags, h),
                              [&](int i) -> float& { return s_[4 * (i / 2) + 2 * h + i % 2]; });
  }
  // The columns of keys that row h reads from this tile.
  __device__ __forceinline__ uint32_t find_visible(const Tile& tile, const Info& info, uint32_t flags, int h) const {
    const int thread = ptx::fresh_thread(), t = thread % 4, left = info.facts.first + t * 2;
    const ExactKeys exact(p_, tile);
    const int query = (first_row(tile) + sm90::row_of_thread(thread) + 8 * h) >> p_.schedule.pack_log2;
    const Keys keys = sm90::visible_keys(p_.schedule, tile, query);
    const bool told = p_.exact || flags & kIncomplete;
    const uint32_t there = told ? info.there[t] : ~0u, held = told ? info.held[t] : 0;
    const uint32_t chosen = held & (columns_in(-sm90::kWide, exact.lead_end - left) |
                                    columns_in(exact.recent_begin(query) - left, sm90::kWide));
    return columns_in(keys.begin - left, keys.end - left) & (flags & kExact ? chosen : there & ~chosen);
  }

  // S to weights, in fp16; `factor` is that of the first columns. take_output(): before they are written, which O is a
  // product of until then. Ends the tile.
  __device__ __forceinline__ void weigh(const Tile& tile, uint32_t flags, float unit, const Columns& columns,
                                        float4 factor, const auto& take_output) {
    uint32_t ahead[kAhead][4];
    float base[2], sum[2];
    const auto start = [&] {
#pragma unroll
      for (int h = 0; h < 2; ++h) base[h] = base_[h] - unit;
      if (flags & kUneven) return;
      sum[0] = sum[1] = 0;
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        const float4 next = load_again(columns.factor + 16 * (i + 1));
        weigh_group<true>(columns, i, factor, base, ahead[i], sum);
        factor = next;
      }
    };
    start();
    take_output();
#pragma unroll 1
    for (float most = kMostWeight;; most = kInf) {
      bool fits;
      if (!(flags & kUneven)) {
        weigh_rest(columns, factor, base, ahead, sum);
        fits = !__any_sync(~0u, fmaxf(sum[0], sum[1]) > most);
        const float share = info().facts.most * (1 / kMostWeight);
        sum[0] *= share;
        sum[1] *= share;
      } else {
        weigh_uneven(columns, base, sum);
        const float share = __fdividef(kMostWeight, info().facts.most);
        fits = !__any_sync(~0u, fmaxf(sum[0], sum[1]) * share > most);
      }
      if (fits) break;
      raise_bases(columns, flags);
      unit = info().facts.unit;
      factor = load_again(columns.factor);
      start();
    }
    sum_[0] += sum[0];
    sum_[1] += sum[1];
    if (flags & kPoison) note_poison(tile, flags);
    __syncwarp();
    shared_.info_empty[rings_.info().at()].arrive();
    rings_.advance_info();
  }
  // Blocks of values that are NaN become it in O of the rows that read them: at the end, so that it is kept.
  __device__ __forceinline__ void note_poison(const Tile& tile, uint32_t flags) const {
    const int t = ptx::fresh_lane() % 4;
    uint32_t found = 0;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const uint32_t visible = find_visible(tile, info(), flags, h);
#pragma unroll
      for (int block = 0; block < C::kBlocks; ++block)
        if (visible & info().poison[block][t]) found |= 1u << (2 * block + h);
    }
    own_poison() |= found;
  }
  // By block and row of the thread, bit 2 block + row: whether the thread's columns of V had NaN.
  __device__ __forceinline__ uint8_t& own_poison() const {
    return shared_.poison[ptx::fresh_thread() - 32 * C::kProducers];
  }
  __device__ __forceinline__ void finish_output() {
    uint32_t poison = own_poison();
    poison |= __shfl_xor_sync(~0u, poison, 1);  // four lanes share a row
    poison |= __shfl_xor_sync(~0u, poison, 2);
#pragma unroll
    for (int i = 0; i < kDim / 2; ++i) {
      const int h = i / 2 % 2;
      if (base_[h] == kLowestBase) o_[i] = 0;
      if (poison >> (i / (C::kWidth / 2) * 2 + h) & 1) o_[i] = float_of(0x7fffffff);
    }
  }
  // What is added to the scores of columns 8 j to 8 j + 15 of row h, `base` included.
  __device__ __forceinline__ float addend_of(const Columns& columns, int j, int h, float factor, float base) const {
    if constexpr (!C::kOffsets) return -base;
    const float offset = offset_of(j, h, factor);
    return columns.offsets ? offset - base : -base;
  }
  // Weights of columns 8 j to 8 j + 15.
  __device__ __forceinline__ void exponentiate(const Columns& columns, int j, const float4& k, const float (&base)[2],
                                               float (&to)[2][4]) const {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float addend = addend_of(columns, j, h, C::kOffsets ? row_factors(h).offsets : 0, base[h]);
      const float* const x = &s_[4 * j + 2 * h];
      to[h][0] = ptx::exp2_approx(fmaf(x[0], k.x, addend));
      to[h][1] = ptx::exp2_approx(fmaf(x[1], k.y, addend));
      to[h][2] = ptx::exp2_approx(fmaf(x[4], k.z, addend));
      to[h][3] = ptx::exp2_approx(fmaf(x[5], k.w, addend));
    }
  }
  // While O of the tile before is under way: weights of as many times 16 keys as there are registers for.
  static constexpr int kAhead = kDim == 64 ? 4 : kDim == 128 || C::kOffsets ? 1 : 2;

  // Weights of 16 keys in fp16, whose sums, without norms, are added to `sum`. kEven: norms are in the values, but for
  // what all of them have in common.
  template <bool kEven>
  __device__ __forceinline__ void weigh_group(const Columns& columns, int i, const float4& factor,
                                              const float (&base)[2], uint32_t (&weights)[4], float (&sum)[2]) const {
    float p[2][4];
    exponentiate(columns, 2 * i, factor, base, p);
    float4 v{1, 1, 1, 1};
    if constexpr (!kEven) v = load_again(info().v_norm[own_columns()] + 4 * i);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      sum[h] += (p[h][0] + p[h][2]) + (p[h][1] + p[h][3]);
      weights[h] = ptx::pack<Float16>(p[h][0] * v.x, p[h][1] * v.y);
      weights[2 + h] = ptx::pack<Float16>(p[h][2] * v.z, p[h][3] * v.w);
    }
  }
  // Weights of a tile but for those that are there already, added to the sums of those; `factor` is that of the first.
  __device__ __forceinline__ void weigh_rest(const Columns& columns, const float4& factor, const float (&base)[2],
                                             const uint32_t (&ahead)[kAhead][4], float (&sum)[2]) {
#pragma unroll
    for (int i = 0; i < kTileK / 16; ++i) {
      if (i < kAhead) {
#pragma unroll
        for (int n = 0; n < 4; ++n) prob_[i][n] = ahead[i][n];
      } else {
        weigh_group<true>(columns, i, i == kAhead ? factor : load_again(columns.factor + 16 * i), base, prob_[i], sum);
      }
    }
  }
  // All weights of a tile with kUneven, and the sums of what norms are multiplied by.
  __device__ __forceinline__ void weigh_uneven(const Columns& columns, const float (&base)[2], float (&sum)[2]) {
    sum[0] = sum[1] = 0;
#pragma unroll
    for (int i = 0; i < kTileK / 16; ++i)
      weigh_group<false>(columns, i, load_again(columns.factor + 16 * i), base, prob_[i], sum);
  }
  __device__ __forceinline__ void raise_bases(const Columns& columns, uint32_t flags) {
    float high[2] = {-kInf, -kInf}, factor[2] = {};
    if constexpr (C::kOffsets) {
#pragma unroll
      for (int h = 0; h < 2; ++h) factor[h] = row_factors(h).offsets;
    }
#pragma unroll
    for (int j = 0; j < kTileK / 8; j += 2) {
      const float4 k = load_again(columns.factor + 8 * j), v = load_again(info().v_norm[own_columns()] + 2 * j);
      const float k_factors[4] = {k.x, k.y, k.z, k.w}, norms[4] = {v.x, v.y, v.z, v.w};
      const float addends[2] = {addend_of(columns, j, 0, factor[0], 0), addend_of(columns, j, 1, factor[1], 0)};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float size =
            flags & kUneven ? __log2f(fminf(fmaxf(fabsf(norms[i]), kLeastNorm), tbq4::kHalfMax)) : info().facts.unit;
#pragma unroll
        for (int h = 0; h < 2; ++h)
          high[h] = fmaxf(high[h], fmaf(s_[4 * j + i / 2 * 4 + 2 * h + i % 2], k_factors[i], addends[h]) + size);
      }
    }
    float o_scale[2];
    bool fresh[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      high[h] = fmaxf(high[h], __shfl_xor_sync(~0u, high[h], 1));
      high[h] = fmaxf(high[h], __shfl_xor_sync(~0u, high[h], 2));
      const bool up = high[h] > base_[h] + kFresh + 2;  // rows that need not, too: others have waited already
      const float base = up ? floorf(high[h]) - kFresh : base_[h];
      fresh[h] = base_[h] == kLowestBase;
      o_scale[h] = ptx::exp2_approx(base_[h] - base);
      base_[h] = base;
    }
    sum_[0] *= o_scale[0];
    sum_[1] *= o_scale[1];
#pragma unroll
    for (int i = 0; i < kDim / 2; ++i) o_[i] = fresh[i / 2 % 2] ? 0 : o_[i] * o_scale[i / 2 % 2];
  }

  const Params& p_;
  typename C::SharedMemory& shared_;
  const int wg_;
  float s_[kTileK / 2], o_[kDim / 2];  // S and O
  uint32_t prob_[kTileK / 16][4];      // weights times norms
  float offset_[2][4];
  float base_[2], sum_[2];  // of the thread's rows; sums are its own parts
  typename C::Rings rings_;
  TilePosition tiles_;
};

}  // namespace flashq::cuda::tbq4_sm90
