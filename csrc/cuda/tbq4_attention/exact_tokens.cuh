// Keys that are read from the exact pool, in 16 bit: a few at the start of a sequence and the most recent ones.
//
// A warp takes 16 tokens at a time, straight from memory to fragments: there are too few of them for a ring to fill.
// Weights have a second 16-bit part, because bf16 ones alone would be off by as much as the whole tolerance of the op.
#pragma once
#include "cuda/tbq4_attention/results.cuh"
#include "cuda/tbq4_attention/scores.cuh"

namespace flashq::cuda {

// Tokens that some row of an item reads exactly, where the pool holds them; counted like the item's keys.
struct ExactRanges {
  int lead_end, recent_begin;

  __device__ __forceinline__ ExactRanges(const CodeParams& p, const Segment& segment, const ItemRows& item)
      : lead_end(0), recent_begin(item.end) {
    if (!p.exact) return;
    const ExactRule rule{p.call.kv.exact_first, p.call.kv.exact_last};
    const Mask mask = segment.sequence.mask(p.call.score);
    const auto in_item = [&](int64_t key) { return static_cast<int>(clamp(key, item.begin, item.end)); };
    lead_end = in_item(rule.leading(mask).end);
    recent_begin = in_item(rule.recent(mask, item.first_query).begin);
  }
  __device__ __forceinline__ bool any(const ItemRows& item) const {
    return lead_end > item.begin || recent_begin < item.end;
  }
};

// The page of the exact pool that has a token, or -1.
__device__ __forceinline__ int64_t exact_page(const CodeParams& p, int sequence, int token) {
  const KvView& pool = p.call.kv.exact;
  const int entry = p.exact_page_size.quotient(token);
  if (pool.page_size == 0 || entry >= pool.max_pages) return -1;
  const int64_t page = pool.block_table(sequence, entry);
  return page >= 0 && page < pool.num_pages ? page : -1;
}

// Eight values, zeros where there are none.
__device__ __forceinline__ Vector<uint32_t, 4> load_eight(const uint16_t* from, bool there, bool wide) {
  Vector<uint32_t, 4> x{};
  if (!there) return x;
  if (wide) return load<Vector<uint32_t, 4>>(from);
#pragma unroll
  for (int i = 0; i < 4; ++i) x.value[i] = from[2 * i] | uint32_t{from[2 * i + 1]} << 16;
  return x;
}

template <class T, int D, int kTiles> class ExactTokens {
  using Tile = CodeTile<D>;
  static constexpr int kLaneDims = Tile::kWidth / 8, kAcc = D / 16;

 public:
  __device__ __forceinline__ ExactTokens(const CodeParams& p, const Segment& segment, const ItemRows& item,
                                         const RowRange* ranges)
      : p_(p), segment_(segment), item_(item), ranges_(ranges), exact_(p, segment, item) {}

  // This warp's share: of groups of 16 tokens, one in `warps`.
  __device__ __forceinline__ void attend(int warp, int warps, LaneStates<kTiles>& state,
                                         float (&acc)[kTiles][kAcc][4]) const {
    int turn = warp;
#pragma unroll 1
    for (int part = 0; part < 2; ++part) {
      const int begin = part == 0 ? item_.begin : max_of(exact_.recent_begin, exact_.lead_end);
      const int end = part == 0 ? exact_.lead_end : item_.end;
#pragma unroll 1
      for (int first = begin & -16; first < end; first += 16) {
        if (turn == 0) attend_group(first, begin, end, state, acc);
        turn = turn == 0 ? warps - 1 : turn - 1;
      }
    }
  }

 private:
  __device__ __forceinline__ void attend_group(int first, int begin, int end, LaneStates<kTiles>& state,
                                               float (&acc)[kTiles][kAcc][4]) const {
    const KvView& pool = p_.call.kv.exact;
    const QueryView& q = p_.call.query;
    const int lane = static_cast<int>(threadIdx.x) % 32, g = lane / 4, t = lane % 4;
    int64_t k_at[2], v_at[2];
    bool there[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int token = first + g + 8 * h;
      const int64_t page = token >= begin && token < end ? exact_page(p_, segment_.sequence.batch, token) : -1;
      const int64_t slot = token - p_.exact_page_size.quotient(token) * static_cast<int>(p_.exact_page_size.value);
      there[h] = page >= 0;
      k_at[h] = page * pool.k_stride[0] + slot * pool.k_stride[1] + item_.kv_head * pool.k_stride[2];
      v_at[h] = there[h] ? page * pool.v_stride[0] + slot * pool.v_stride[1] + item_.kv_head * pool.v_stride[2] : -1;
    }
    float s[kTiles][4] = {};
#pragma unroll 1
    for (int i = 0; i < D / 32; ++i) {  // of 8 dims for each of the four lanes of a row
      constexpr int kChunks = Tile::kWidth / 32;
      const int column = i / kChunks * Tile::kWidth + t * (Tile::kWidth / 4) + i % kChunks * 8;
      Vector<uint32_t, 4> k[2];
#pragma unroll
      for (int h = 0; h < 2; ++h)
        k[h] = load_eight(static_cast<const uint16_t*>(pool.k) + k_at[h] + column, there[h], p_.wide_exact);
#pragma unroll
      for (int n = 0; n < kTiles; ++n) {
        const int row = 8 * n + g;
        const bool real = row < item_.rows;
        const int64_t from = query_offset(q, p_.split.group, segment_, item_, real ? row : 0);
        const auto query = load_eight(static_cast<const uint16_t*>(q.q) + from + column, real, p_.wide_q);
#pragma unroll
        for (int j = 0; j < 4; j += 2) {
          const uint32_t a[4] = {k[0].value[j], k[1].value[j], k[0].value[j + 1], k[1].value[j + 1]};
          ptx::mma_16x8x16<T>(s[n], a, query.value[j], query.value[j + 1]);
        }
      }
    }
    uint32_t weight[kTiles][2][2];  // P^T of 8 tokens: high and low parts
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
      bool hidden[2][2];
      float top[2] = {-kInf, -kInf};
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const RowRange keys = ranges_[8 * n + 2 * t + c];
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const int token = first + g + 8 * h;
          hidden[h][c] =
              !there[h] || token < keys.begin || token >= keys.end || (token >= exact_.lead_end && token < keys.recent);
          float& x = s[n][2 * h + c];
          x = finish_score(p_.rule, x * p_.rule.factor);
          if (!hidden[h][c]) top[c] = fmaxf(top[c], x);
        }
#pragma unroll
        for (int step = 4; step < 32; step *= 2) top[c] = fmaxf(top[c], __shfl_xor_sync(~0u, top[c], step));
        if (const float base = floorf(top[c]); base > state.base[n][c]) state.move_base(n, c, base, acc[n]);
      }
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        float x[2];
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          x[c] = hidden[h][c] ? 0 : ptx::exp2_approx(s[n][2 * h + c] - state.base[n][c]);
          state.sum[n][c] += x[c];
        }
        const uint32_t high = ptx::pack<T>(x[0], x[1]);
        const uint32_t low = ptx::pack<T>(x[0] - T::load(static_cast<uint16_t>(high)),
                                          x[1] - T::load(static_cast<uint16_t>(high >> 16)));
        weight[n][h][0] = ptx::transpose_8x8(high);
        weight[n][h][1] = ptx::transpose_8x8(low);
      }
    }
    int64_t from[4];  // tokens 2 t, 2 t + 1, and 8 further
#pragma unroll
    for (int i = 0; i < 4; ++i) from[i] = __shfl_sync(~0u, v_at[i / 2], 4 * (2 * t + i % 2));
#pragma unroll
    for (int i = 0; i < D / 64; ++i) {  // of 8 dims for each of the eight rows g
      constexpr int kChunks = kLaneDims / 8;
      const int column = i / kChunks * Tile::kWidth + g * kLaneDims + i % kChunks * 8;
      Vector<uint32_t, 4> v[4];
#pragma unroll
      for (int j = 0; j < 4; ++j)
        v[j] = load_eight(static_cast<const uint16_t*>(pool.v) + from[j] + column, from[j] >= 0, p_.wide_exact);
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        const uint32_t a[4] = {__byte_perm(v[0].value[w], v[1].value[w], 0x5410),
                               __byte_perm(v[0].value[w], v[1].value[w], 0x7632),
                               __byte_perm(v[2].value[w], v[3].value[w], 0x5410),
                               __byte_perm(v[2].value[w], v[3].value[w], 0x7632)};
#pragma unroll
        for (int n = 0; n < kTiles; ++n)
#pragma unroll
          for (int part = 0; part < 2; ++part)
            ptx::mma_16x8x16<T>(acc[n][4 * i + w], a, weight[n][0][part], weight[n][1][part]);
      }
    }
  }

  const CodeParams& p_;
  const Segment& segment_;
  const ItemRows& item_;
  const RowRange* ranges_;
  ExactRanges exact_;
};

}  // namespace flashq::cuda
