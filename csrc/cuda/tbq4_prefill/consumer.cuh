// A consumer warpgroup: 64 query rows against the tiles of keys that the producers expand.
//
//   S (64 x kTileK) = Q' C_k^T, then times the keys' norms: scores.  P = 2^(S -
//   base), sums in fp32. O' (64 x kDim) += (P times the values' norms, in fp16)
//   C_v, rotated back at the end.
//
// A row's base is raised when a weight times its norm may leave fp16, not when a score exceeds the largest: so what a
// row looks at keeps its bits beside norms that it does not look at.
#pragma once
#include "cuda/ptx/tma.cuh"
#include "cuda/ptx/wgmma.cuh"
#include "cuda/tbq4_attention/scores.cuh"
#include "cuda/tbq4_prefill/finish_tile.cuh"

namespace flashq::cuda::tbq4_sm90 {

inline constexpr float kRoom = 15;  // log2 of the largest weight in fp16
// kFreshWeight of tbq4_attention/weights.cuh: log2 of the largest weight after its row's base is raised.
inline constexpr float kFresh = 7;

// tanh without branches, off by 3e-7: the hardware's, off by 5e-4, would use up the tolerance.
__device__ __forceinline__ float smooth_tanh(float x) {
  const float square = x * x;
  const float small =
      x * fmaf(square, fmaf(square, fmaf(square, fmaf(square, 62.f / 2835, -17.f / 315), 2.f / 15), -1.f / 3), 1);
  const float e = ptx::exp2_approx(fabsf(x) * (-2 * kLog2E));
  return fabsf(x) < 0.3f ? small : copysignf(__fdividef(1 - e, 1 + e), x);
}

template <class C> class Consumer {
  static constexpr int kTileK = C::kTileK, kDim = C::kDim;
  using Info = KeyTile<kTileK>;

 public:
  __device__ __forceinline__ Consumer(const Params& p, typename C::SharedMemory& shared)
      : p_(p), shared_(shared), wg_(__shfl_sync(~0u, (static_cast<int>(threadIdx.x) - 32 * C::kProducers) / 128, 0)) {}

  __device__ __forceinline__ void run() {
    const int lane = static_cast<int>(threadIdx.x) % 32;
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
      finish_tile<C>(p_, tile, first_row(tile), !own_keys().missing, o_, rows_);
      __syncwarp();
      if (lane == 0) shared_.tile_empty[tiles_.at()].arrive();
      tiles_.advance();
    }
  }

 private:
  __device__ __forceinline__ void take_turn() const { ptx::named_barrier_sync(C::turn_barrier(wg_), 256); }
  __device__ __forceinline__ void pass_turn() const {
    ptx::named_barrier_arrive(C::turn_barrier((wg_ + 1) % C::kConsumers), 256);
  }
  __device__ __forceinline__ void release(ptx::Barrier& empty) const {
    if (threadIdx.x % 32 == 0) empty.arrive();
  }

  __device__ __forceinline__ void begin_rows(const Tile& tile) {
    rows_ = {{kLowestBase, kLowestBase}, {0, 0}};
#pragma unroll
    for (float& x : o_) x = 0;
#pragma unroll
    for (auto& words : prob_)
#pragma unroll
      for (uint32_t& x : words) x = 0;
    // Keys that all rows read as codes.
    const int row0 = first_row(tile), pack_log2 = p_.schedule.pack_log2;
    const int first_query = row0 >> pack_log2, last_query = (row0 + C::kRows - 1) >> pack_log2;
    const ExactKeys exact(p_, tile);
    own_keys().clear = {max(sm90::visible_keys(p_.schedule, tile, last_query).begin, exact.lead_end),
                        min(sm90::visible_keys(p_.schedule, tile, first_query).end, exact.recent_begin(first_query))};
    own_keys().missing = false;
#pragma unroll
    for (int h = 0; h < 2; ++h) row_factors(h) = p_.rows[scratch_row(tile, h)].factors;
    __syncwarp();
  }
  __device__ __forceinline__ int first_row(const Tile& tile) const { return tile.row + wg_ * C::kRows; }
  __device__ __forceinline__ WarpKeys& own_keys() const {
    return shared_.warp_keys[ptx::fresh_thread() / 32 - C::kProducers];
  }
  // Of a row of the thread; in shared memory, because registers are scarce.
  __device__ __forceinline__ RowFactors& row_factors(int h) const {
    const auto thread = static_cast<uint32_t>(ptx::fresh_thread());  // unsigned: divisions are shifts
    return shared_.row_factors[thread % 256 / 32 * 16 + thread % 32 / 4 + 8 * h];
  }
  __device__ __forceinline__ float factor(int h) const { return p_.general ? 1 : row_factors(h).scores; }
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
    const uint64_t x = ptx::matrix_descriptor(&shared_.offsets[rings_.k().at()], 16);
#pragma unroll
    for (int i = 0; i < 2; ++i) ptx::pin(offset_[i]);
#pragma unroll
    for (int d = 0; d < kDim / 16; ++d)
      ptx::Wgmma<8>::template ss<Float16>(offset_[d % 2], q + (d / 4 * sizeof shared_.q[0][0] + d % 4 * 32) / 16,
                                          x + (d / 4 * 1024 + d % 4 * 32) / 16, d > 1);
  }
  // `step`: of the descriptor, from 16 rows of V to the next; a box is kTileK / 16 of them.
  __device__ __forceinline__ void issue_output(uint64_t v, uint64_t step) {
    ptx::pin(o_);
    ptx::wgmma_fence();
#pragma unroll
    for (int n = 0; n < kTileK / 16; ++n)
#pragma unroll
      for (int half = 0; half < kDim / kColumns; ++half)
        ptx::Wgmma<kColumns>::template rs<Float16>(*reinterpret_cast<float (*)[kColumns / 2]>(o_ + half * kColumns / 2),
                                                   prob_[n], v + (n + half * (kColumns / 64 * kTileK / 16)) * step);
    ptx::wgmma_commit();
  }
  static constexpr uint64_t kStep = 2048 / 16;
  // Of O in a product: of head dim 256 it takes more registers than a thread has at launch, which ptxas refuses.
  static constexpr int kColumns = kDim < 128 ? kDim : 128;
  __device__ __forceinline__ uint64_t values_of(int stage) const {
    return ptx::matrix_descriptor(&shared_.v[stage], sizeof shared_.v[0][0]);
  }
  // One KB of zeros, again and again.
  __device__ __forceinline__ uint64_t no_values() const {
    return ptx::matrix_descriptor(&shared_.zeros, 0) & ~(uint64_t{0x3fff} << 32);
  }

  // Adds to S what rounding queries to fp16, and with kRest keys, has left out; both rare. With kRest S holds the
  // product with that rest, the keys themselves are in the next K buffer, and their large products come last: every
  // step rounds. Leaves the last K buffer of the tile in rings_.k().
  __device__ __forceinline__ void add_rest(const Tile& tile, uint32_t flags) {
    if (flags & kRest) {
      release(shared_.k_empty[rings_.k().at()]);
      rings_.advance_k();
      shared_.k_full[rings_.k().at()].wait(rings_.k().parity());
    }
    const uint64_t k = ptx::matrix_descriptor(&shared_.k[rings_.k().at()], 16);
    const int t = static_cast<int>(threadIdx.x) % 4;
#pragma unroll 1
    for (int d = 0; d < kDim / 16; ++d) {
      uint32_t a[4];
#pragma unroll
      for (int i = 0; i < 4; ++i)
        a[i] = load<uint32_t>(p_.q_rest + scratch_row(tile, i % 2) * kDim + d * 16 + t * 2 + i / 2 * 8);
      ptx::pin(s_);
      ptx::wgmma_fence();
      ptx::Wgmma<kTileK>::template rs<Float16, 0>(s_, a, k + (d / 4 * sizeof shared_.k[0][0] + d % 4 * 32) / 16);
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

  // S of a tile and O of the one before it are in flight together. Before the first one O is a product of zeros, so
  // that there is one copy of the code.
  __device__ __forceinline__ void attend(const Tile& tile) {
    shared_.q_full[wg_].wait(tiles_.q_parity());
    bool first = true;
    uint32_t flags;
#pragma unroll 1
    do {
      shared_.k_full[rings_.k().at()].wait(rings_.k().parity());
      take_turn();
      issue_scores(true);
      const auto values = rings_.v(1);
      if (!first) shared_.v_full[values.at()].wait(values.parity());
      issue_output(first ? no_values() : values_of(values.at()), first ? 0 : kStep);
      pass_turn();
      ptx::wgmma_wait<1>();
      ptx::pin(s_);
      flags = finish_scores(tile);
      const bool grew = weigh(tile, flags);
      ptx::wgmma_wait<0>();
      ptx::pin(o_);
      if (!first) release(shared_.v_empty[rings_.v(1).at()]);
      first = false;
      round_weights(tile, flags);
      if (grew) {
#pragma unroll
        for (int i = 0; i < kDim / 2; ++i) o_[i] *= o_scale_[i / 2 % 2];
      }
    } while (!(flags & kLast));
    const auto values = rings_.v(1);
    shared_.v_full[values.at()].wait(values.parity());
    issue_output(values_of(values.at()), kStep);
    ptx::wgmma_wait<0>();
    ptx::pin(o_);
    release(shared_.v_empty[values.at()]);
  }
  // Products of a tile's keys to scores, or to scores without their row's factor. Returns the tile's flags.
  __device__ __forceinline__ uint32_t finish_scores(const Tile& tile) {
    const Info& info = shared_.info[rings_.info().at()];
    const uint32_t flags = info.flags;
    if (flags & kCoarse) {
      if constexpr (C::kOffsets) ptx::wgmma_wait<0>();  // one wait for products of several commits
      add_rest(tile, flags);
    }
    release(shared_.k_empty[rings_.k().at()]);
    rings_.advance_k();
    if (flags & kLast && threadIdx.x % 32 == 0) shared_.q_empty[wg_].arrive();

    const int t = static_cast<int>(threadIdx.x) % 4;
#pragma unroll
    for (int j = 0; j < kTileK / 8; j += 2) {
      const auto norm = load<float4>(&info.k_norm[t][2 * j]);
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        s_[4 * j + 2 * h] *= norm.x;
        s_[4 * j + 2 * h + 1] *= norm.y;
        s_[4 * j + 2 * h + 4] *= norm.z;
        s_[4 * j + 2 * h + 5] *= norm.w;
      }
    }
    if (p_.general) generalize(flags);
    if (flags & kIncomplete) own_keys().missing = true;
    return flags;
  }
  // Row factors, page offsets and the cap.
  __device__ __forceinline__ void generalize(uint32_t flags) {
    if constexpr (C::kOffsets) {
#pragma unroll
      for (int i = 0; i < 2; ++i) ptx::pin(offset_[i]);
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const RowFactors factors = row_factors(h);
#pragma unroll
      for (int j = 0; j < kTileK / 8; ++j) {
        float offset = 0;
        if constexpr (C::kOffsets) {
          const float mine = offset_[0][2 * h + j / 2 % 2] + offset_[1][2 * h + j / 2 % 2];
          const float shared = __shfl_sync(~0u, mine, j / 4, 4);
          offset = flags & kExact ? 0 : shared * factors.offsets;
        }
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          float& x = s_[4 * j + 2 * h + e];
          x = C::kOffsets ? fmaf(x, factors.scores, offset) : x * factors.scores;
        }
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
  }
  // The columns of keys that row h reads from this tile.
  __device__ __forceinline__ uint32_t find_visible(const Tile& tile, const Info& info, uint32_t flags, int h) const {
    const int thread = ptx::fresh_thread(), t = thread % 4, left = info.first + t * 2;
    const ExactKeys exact(p_, tile);
    const int query = (first_row(tile) + sm90::row_of_thread(thread) + 8 * h) >> p_.schedule.pack_log2;
    const Keys keys = sm90::visible_keys(p_.schedule, tile, query);
    const uint32_t chosen = info.held[t] & (columns_in(-sm90::kWide, exact.lead_end - left) |
                                            columns_in(exact.recent_begin(query) - left, sm90::kWide));
    return columns_in(keys.begin - left, keys.end - left) & (flags & kExact ? chosen : info.there[t] & ~chosen);
  }

  // S to weights times norms, in place. Returns whether O has to be multiplied by o_scale_.
  __device__ __forceinline__ bool weigh(const Tile& tile, uint32_t flags) {
    const Info& info = shared_.info[rings_.info().at()];
    const Keys clear = own_keys().clear;
    if (flags & (kExact | kIncomplete) || info.first < clear.begin || info.first + kTileK > clear.end) {
#pragma unroll
      for (int h = 0; h < 2; ++h)
        mask_scores<kTileK / 4>(find_visible(tile, info, flags, h),
                                [&](int i) -> float& { return s_[4 * (i / 2) + 2 * h + i % 2]; });
    }
    const int t = static_cast<int>(threadIdx.x) % 4;
    const float4 tops = load<float4>(info.v_top), more = load<float4>(info.v_top + 4);
    const float top =
        fmaxf(fmaxf(fmaxf(tops.x, tops.y), fmaxf(tops.z, tops.w)), fmaxf(fmaxf(more.x, more.y), fmaxf(more.z, more.w)));
    bool over = false, grew = false;
    float own_factor[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      own_factor[h] = factor(h);
      // Of all negative scores the result is some negative number.
      const float largest = max_of(sm90::reduce_bits<true>(s_, h), 0.f);
      over |= fmaf(largest, own_factor[h], top) > rows_.base[h] + kRoom;
    }
    if (__any_sync(~0u, over)) grew = raise_bases(info, own_factor);
    float sum[2][2] = {};
#pragma unroll
    for (int j = 0; j < kTileK / 8; j += 2) {
      asm volatile("" ::: "memory");  // norms are loaded late, or there are no registers for them
      const auto norm = load<float4>(&info.v_norm[t][2 * j]);
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        float* const x = &s_[4 * j + 2 * h];
        const auto power = [&](float y) { return ptx::exp2_approx(fmaf(y, own_factor[h], -rows_.base[h])); };
        const float a = power(x[0]), b = power(x[1]), c = power(x[4]), d = power(x[5]);
        sum[h][0] += a + c;
        sum[h][1] += b + d;
        x[0] = a * norm.x;
        x[1] = b * norm.y;
        x[4] = c * norm.z;
        x[5] = d * norm.w;
      }
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) rows_.sum[h] += sum[h][0] + sum[h][1];
    return grew;
  }
  __device__ __forceinline__ bool raise_bases(const Info& info, const float (&factors)[2]) {
    const int t = static_cast<int>(threadIdx.x) % 4;
    float high[2] = {-kInf, -kInf};
#pragma unroll
    for (int j = 0; j < kTileK / 8; j += 2) {
      const auto norm = load<float4>(&info.v_norm[t][2 * j]);
      const float norms[4] = {norm.x, norm.y, norm.z, norm.w};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float size = __log2f(fminf(fmaxf(fabsf(norms[i]), 0x1p-24f), tbq4::kHalfMax));
#pragma unroll
        for (int h = 0; h < 2; ++h)
          high[h] = fmaxf(high[h], fmaf(s_[4 * j + i / 2 * 4 + 2 * h + i % 2], factors[h], size));
      }
    }
    bool grew = false;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      high[h] = fmaxf(high[h], __shfl_xor_sync(~0u, high[h], 1));
      high[h] = fmaxf(high[h], __shfl_xor_sync(~0u, high[h], 2));
      const bool up = high[h] > rows_.base[h] + kRoom;
      const float base = up ? floorf(high[h]) - kFresh : rows_.base[h];
      o_scale_[h] = ptx::exp2_approx(rows_.base[h] - base);
      rows_.sum[h] *= o_scale_[h];
      rows_.base[h] = base;
      grew |= up;
    }
    return __any_sync(~0u, grew);
  }

  // Weights to fp16. Ends the tile.
  __device__ __forceinline__ void round_weights(const Tile& tile, uint32_t flags) {
#pragma unroll
    for (int i = 0; i < kTileK / 2; i += 2) prob_[i / 8][i / 2 % 4] = ptx::pack<Float16>(s_[i], s_[i + 1]);
    if (flags & kPoison) {  // 0 times NaN
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const uint32_t visible = find_visible(tile, shared_.info[rings_.info().at()], flags, h);
#pragma unroll
        for (int j = 0; j < kTileK / 8; ++j)
          prob_[j / 2][j % 2 * 2 + h] &= (visible >> 2 * j & 1) * 0xffffu | (visible >> (2 * j + 1) & 1) * 0xffff0000u;
      }
    }
    __syncwarp();  // all lanes have read what is known of the tile
    release(shared_.info_empty[rings_.info().at()]);
    rings_.advance_info();
  }

  const Params& p_;
  typename C::SharedMemory& shared_;
  const int wg_;
  float s_[kTileK / 2], o_[kDim / 2], o_scale_[2];  // S and O
  uint32_t prob_[kTileK / 16][4];                   // weights times norms
  float offset_[2][4];
  RowState rows_;
  typename C::Rings rings_;
  TilePosition tiles_;
};

}  // namespace flashq::cuda::tbq4_sm90
