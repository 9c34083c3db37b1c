// What a warp of the kernel knows of its segment: whose share is its own, which keys its rows see, where its queries
// are, and what page offsets add to its scores.
#pragma once
#include "cuda/ptx/fresh_thread.cuh"
#include "cuda/tbq4_attention/code_stream.cuh"
#include "cuda/tbq4_attention/exact_rule.cuh"

namespace flashq::cuda {

template <int D, int kTiles> class CodeWarp {
  using Tile = CodeTile<D>;

 protected:
  __device__ __forceinline__ CodeWarp(const CodeParams& p, unsigned char* shared)
      : p_(p), shared_(shared), mine_(reinterpret_cast<CodeSegments*>(shared + p.at.segments)[threadIdx.x / 32]) {}

  // Read anew where they are needed: the main loop is short of registers.
  static __device__ __forceinline__ int warp() { return ptx::fresh_thread() / 32; }
  // Whose share of the plan is this warp's. Neighbouring shares are of the same item, and its queries are rotated once
  // for a CTA.
  __device__ __forceinline__ int worker() const {
    const auto cta = static_cast<int>(blockIdx.x);
    return p_.cluster_ctas > 0 ? warp() * p_.cluster_ctas + (cta & (p_.cluster_ctas - 1))
                               : cta * (static_cast<int>(blockDim.x) / 32) + warp();
  }

  // The next segment that the stream has entered: which of its keys all rows see.
  __device__ __forceinline__ void begin_segment() {
    const int begun = mine_.begun;
    copy_words(static_cast<SegmentRows&>(mine_), mine_.waiting[begun % kWaiting]);
    publish(mine_.begun, begun + 1);
    const Segment& segment = mine_.segment;
    const ItemRows& item = mine_.item;
    const Mask mask = segment.sequence.mask(p_.call.score);
    const ExactRanges exact(p_, segment, item);
    const auto in_item = [&](int64_t key) { return static_cast<int>(clamp(key, item.begin, item.end)); };
    constexpr int kTokens = Tile::kTokens;
    const int end = max_of((item.end + kTokens - 1) / kTokens, 1) * kTokens;
    tiles_ = segment.given() ? (end - (item.begin & -kTokens)) / kTokens : 0;
    const int clear_begin = max_of(in_item(mask.visible(item.last_query).begin), exact.lead_end);
    const int clear_end = min_of(in_item(mask.visible(item.first_query).end), exact.recent_begin);
    const int behind = divide_down(end - clear_end + kTokens - 1, kTokens);
    const int count = mine_.complete ? max_of(divide_down(end - clear_begin, kTokens) - behind, 0) : 0;
    publish(mine_.range, ClearTiles{behind, count, end, 0});
    if (exact.lead_end > item.begin || exact.recent_begin < item.end) [[unlikely]]
      look_up_exact(exact);
  }
  // Which groups of 16 tokens the exact pool holds, of leading and recent ones: one wait for its table, not one for
  // every tile.
  __device__ __forceinline__ void look_up_exact(const ExactRanges& exact) const {
    const ItemRows& item = mine_.item;
    uint32_t held[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int group = (h == 0 ? item.begin : exact.recent_begin) / 16;
      const int token = (group + ptx::fresh_lane()) * 16;
      const bool wanted = token < (h == 0 ? exact.lead_end : item.end);
      held[h] = wanted && exact_page(p_, mine_.segment.sequence.batch, token) >= 0;
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) publish(mine_.held[h], __ballot_sync(~0u, held[h]));
  }
  // Whether it holds a token that is a leading (h: 0) or recent (1) one.
  __device__ __forceinline__ bool holds(const ExactRanges& exact, int token, int h) const {
    const int group = token / 16 - (h == 0 ? mine_.item.begin : exact.recent_begin) / 16;
    if (group < 32 && p_.exact_page_size.value % 16 == 0) return mine_.held[h] >> group & 1;
    return exact_page(p_, mine_.segment.sequence.batch, token) >= 0;
  }
  __device__ __forceinline__ QueryScale* scales_of(int warp) const {
    return reinterpret_cast<QueryScale*>(shared_ + p_.at.states) + warp * p_.rows;
  }
  // Rotates the queries of this warp's segment, or, `together`, the warps of a CTA those of all their segments, which
  // are of few items: neighbouring ones share theirs. Returns the warp that this one's queries are with.
  __device__ __forceinline__ int rotate_queries(bool together) const {
    using Rotation = QueryRotation<D>;
    const int own = warp(), warps = together ? static_cast<int>(blockDim.x) / 32 : 1;
    const auto* all = reinterpret_cast<const CodeSegments*>(shared_ + p_.at.segments);
    int before = 0, owner = 0, from = own;  // groups of rows of earlier warps; whose item is the same as that of w
#pragma unroll 1
    for (int i = 0; i < warps; ++i) {
      const int w = together ? i : own;
      const Segment& segment = all[w].segment;
      const bool same = i > 0 && segment.given() && all[w - 1].segment.given() &&
                        segment.item == all[w - 1].segment.item &&
                        segment.sequence.batch == all[w - 1].segment.sequence.batch;
      if (!same) owner = w;
      if (w == own) from = owner;
      if (same || !segment.given()) continue;
      Rotation::template rotate<false>(p_, all[w], divide_rest(own - before, warps), warps,
                                       queries_of_warp<D, kTiles>(shared_, w), scales_of(w));
      before += (all[w].item.rows + Rotation::kRows - 1) / Rotation::kRows;
    }
    return from;
  }
  // The first turn, from 0 on, of one of `turns` that is `after` turns away, which may be negative.
  static __device__ __forceinline__ int divide_rest(int after, int turns) {
    while (after < 0) after += turns;
    return turns == 1 ? 0 : after;
  }

  // The first token of the tile.
  __device__ __forceinline__ int first_token() const { return mine_.range.end - tiles_ * Tile::kTokens; }

  __device__ __forceinline__ unsigned char* page_scores() const {
    return shared_ + p_.at.offsets + warp() * (kOffsetPages * kOffsetBytes<kTiles>);
  }
  // The entries from that of `token` on.
  __device__ __forceinline__ void score_entries(int token) const {
    const int lane = ptx::fresh_lane(), g = lane / 4, t = lane % 4, first = p_.page_size.quotient(token);
    const ItemRows& item = mine_.item;
    const int64_t size = p_.page_size.value;
    const int entry = first + lane % kOffsetPages;
    const bool seen = entry * size < item.end && (entry + 1) * size > item.begin;
    const int own = seen ? static_cast<int>(page_of_entry(p_, mine_.segment.sequence.batch, entry)) : -1;
    const int page[2] = {__shfl_sync(~0u, own, g), __shfl_sync(~0u, own, g + 8)};
    float s[kTiles][4];
    score_pages<D, kTiles>(p_, mine_.segment, item, page, s);
    __syncwarp();
#pragma unroll
    for (int n = 0; n < kTiles; ++n)
#pragma unroll
      for (int h = 0; h < 2; ++h)
        store(page_scores() + (g + 8 * h) * kOffsetBytes<kTiles> + (8 * n + 2 * t) * 4,
              Vector<float, 2>{s[n][2 * h], s[n][2 * h + 1]});
    if (lane == 0) {
      mine_.first_entry = first;
      mine_.range.scored = static_cast<int>(min_of<int64_t>((first + kOffsetPages) * size, INT32_MAX));
    }
    __syncwarp();
  }

  struct OfTokens { float s[kTiles][4]; };
  static __device__ __noinline__ OfTokens score_scattered(const CodeParams& p, const CodeSegments& mine, int token) {
    const ItemRows& item = mine.item;
    int page[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const bool seen = token + h >= item.begin && token + h < item.end;
      page[h] = seen ? static_cast<int>(plane_row(p, mine.segment.sequence.batch, item.kv_head, token + h).page) : -1;
    }
    OfTokens of;
    score_pages<D, kTiles>(p, mine.segment, item, page, of.s);
    return of;
  }

  // One bit for each of the lane's tokens and rows: the row does not read the token from the codes. `complete`: all
  // tokens that some row sees are there.
  __device__ __forceinline__ uint32_t find_hidden(bool complete) const {
    const int lane = ptx::fresh_lane(), g = lane / 4, t = lane % 4;
    const ItemRows& item = mine_.item;
    const ExactRanges exact(p_, mine_.segment, item);
    const ExactRule rule{p_.call.kv.exact_first, p_.call.kv.exact_last};
    const Mask mask = mine_.segment.sequence.mask(p_.call.score);
    const int sequence = mine_.segment.sequence.batch, first = first_token() + Tile::piece(g) * Tile::kPerLane;
    constexpr uint32_t kAll = (1u << Tile::kPerLane) - 1;  // a bit for each token
    const auto between = [&](int64_t begin, int64_t end) {
      const auto place = [&](int64_t key) { return static_cast<int>(clamp(key - first, 0, Tile::kPerLane)); };
      return ((1u << place(end)) - 1) & (~0u << place(begin));
    };
    uint32_t there = between(item.begin, item.end), held = 0;
    if (!complete) [[unlikely]] {
#pragma unroll 1
      for (int i = 0; i < Tile::kPerLane; ++i)
        if ((there >> i & 1) && plane_row(p_, sequence, item.kv_head, first + i).row < 0) there &= ~(1u << i);
    }
    const uint32_t lead = between(item.begin, exact.lead_end);
    if (const uint32_t late = between(exact.recent_begin, item.end) & ~lead; lead | late) {
      if (p_.exact_page_size.value % 16 == 0) {  // all of them are on one page
        held = (lead && holds(exact, first, 0) ? lead : 0) | (late && holds(exact, first, 1) ? late : 0);
      } else {
#pragma unroll 1
        for (int i = 0; i < Tile::kPerLane; ++i)
          if (((lead | late) >> i & 1) && holds(exact, first + i, lead >> i & 1 ? 0 : 1)) held |= 1u << i;
      }
    }
    // Of the lane's tokens, in the bits that they have in the result.
    const auto hidden_from = [&](int query) {
      const KeyRange keys = mask.visible(query);
      const uint32_t exactly = held & (lead | between(rule.recent(mask, query).begin, item.end));
      const uint32_t tokens = kAll & ~(there & between(keys.begin, keys.end) & ~exactly);
      uint32_t spread = 0;
#pragma unroll
      for (int i = 0; i < Tile::kPerLane; ++i) spread |= (tokens >> i & 1) << (i * 2 * kTiles);
      return spread;
    };
    if (item.first_query == item.last_query) return hidden_from(item.first_query) * ((1u << 2 * kTiles) - 1);
    uint32_t hidden = 0;
#pragma unroll 1
    for (int k = 0; k < 2 * kTiles; ++k) {
      const int row = k / 2 * 8 + 2 * t + k % 2;
      hidden |= hidden_from(p_.split.group.quotient(item.first_row + min_of(row, item.rows - 1))) << k;
    }
    return hidden;
  }

  const CodeParams& p_;
  unsigned char* shared_;
  CodeSegments& mine_;
  int tiles_ = 0;  // that the segment has left, this one included
};

}  // namespace flashq::cuda
