// Launches by size, each instantiated in a file of its own so that they compile side by side.
#pragma once
#include <algorithm>
#include <bit>
#include <cstdint>

#include "cuda/launch.h"
#include "cuda/prefill_sm90/traits.cuh"

namespace flashq::cuda::sm90 {

inline constexpr int64_t kMostRows = int64_t{1} << 29;  // positions, rows and tiles fit an int, window and all

// Query heads of one KV head that a tile takes together: a power of two, because row -> token is a shift.
inline int64_t pack_of(const QueryView& q) {
  return std::min<int64_t>(1 << std::countr_zero(uint64_t(q.q_heads / q.kv_heads)), 64);
}

// Keys in a cache, with lengths that only the device knows.
inline bool is_cache(const Attention16Params& p) { return p.seqlens.given(); }

// Which of the two kernels, see Traits.
inline bool is_general(const Attention16Params& p) {
  return p.score.softcap > 0 || !(p.score.scale > 0) || is_cache(p);
}
constexpr int tile_rows(int64_t head_dim, bool general) { return head_dim <= 64 && !general ? 192 : 128; }

// Into how many parts, `most` at most, the keys of so many tiles of rows are split, so that all multiprocessors (of the
// usual card) have work.
inline int64_t best_splits(int64_t tiles, int64_t most) {
  constexpr int kMultiprocessors = 132;
  if (tiles >= 2 * kMultiprocessors) return 1;
  // Of the tiles one after the other on a multiprocessor, and 1 % a split for merging.
  const auto rounds = [&](int64_t splits) {
    return static_cast<double>(ceil_div(tiles * splits, kMultiprocessors)) / static_cast<double>(splits) *
           (1 + 0.01 * static_cast<double>(splits));
  };
  int64_t best = 1;
  for (int64_t splits = 2; splits <= most; ++splits)
    if (rounds(splits) < rounds(best)) best = splits;
  return best;
}

// Into how many parts the keys of a tile of rows are split. By the rows of one sequence, so that they do not depend on
// batch mates; of a cache by all rows, but not by its capacity. Lengths of packed keys are not known here.
inline int count_splits(const Attention16Params& p) {
  const QueryView& q = p.query;
  if (p.kv.cu_seqlens_k.given()) return 1;
  const int64_t pack = pack_of(q), rows = tile_rows(q.head_dim, is_general(p));
  const int64_t row_tiles = q.cu_seqlens_q.given() ? ceil_div(q.total_tokens * pack, rows)  // or some more
                                                   : ceil_div(q.q_len * pack, rows) * (is_cache(p) ? q.batch : 1);
  const int64_t tiles = row_tiles * (q.q_heads / pack);
  int64_t keys = is_cache(p) ? int64_t{kMostSplits} * kLeastSplit : p.kv.page_size;  // that a tile may see
  const int64_t right = p.score.causal ? 0 : p.score.window_right;
  if (p.score.window_left >= 0 && right >= 0) keys = std::min(keys, p.score.window_left + right + rows);
  const int64_t most = std::min<int64_t>(keys / kLeastSplit, is_cache(p) ? kMostSplits : kMostSplits / 4);
  return static_cast<int>(best_splits(tiles, most));
}

// Bytes from the start of the scratch: the plan, then the partial results of splits.
struct ScratchPlan {
  int64_t partial_out, partial_lse, end;

  ScratchPlan(const Attention16Params& p, int64_t splits) {
    const int64_t rows = splits > 1 ? splits * p.query.total_tokens * p.query.q_heads : 0;
    const bool planned = p.query.cu_seqlens_q.given() || is_cache(p);
    partial_out =
        round_up(static_cast<int64_t>(sizeof(Plan) + (planned ? p.query.batch * sizeof(PlannedSequence) : 0)), 64);
    partial_lse = partial_out + rows * p.query.head_dim * 4;
    end = partial_lse + rows * 4;
  }
};

// What a schedule has of a call, whatever its keys look like; a key and its value are `key_bytes` in device memory.
inline Schedule make_schedule(const AttentionParams& a, int splits, int64_t key_bytes) {
  constexpr int64_t kL2Section = 32 << 20;  // bytes; more of an H200's 60 MiB of L2 leave no room for Q and O
  const QueryView& q = a.query;
  const bool packed = q.cu_seqlens_q.given();
  const int64_t pack = pack_of(q);
  const auto limit = [](int64_t window) {
    return static_cast<int>(window < 0 ? kWide : std::min<int64_t>(window, kWide));
  };
  Schedule s{};
  s.window_left = limit(a.score.window_left);
  s.window_right = a.score.causal ? 0 : limit(a.score.window_right);
  s.descending = s.window_right != kWide && s.window_left == kWide;
  s.l2_keys = static_cast<int>(kL2Section / key_bytes);
  s.batch = static_cast<int>(packed ? 1 : q.batch);
  s.q_len = static_cast<int>(packed ? q.total_tokens : q.q_len);
  s.pack_log2 = std::countr_zero(static_cast<uint64_t>(pack));
  s.head_packs = static_cast<int>(q.q_heads / pack);
  s.packs_per_kv = static_cast<int>(q.q_heads / q.kv_heads / pack);
  s.splits = splits;
  return s;
}

// The small kernels around it. launch_status() tells of both.
void launch_plan(const Attention16Params&, const Schedule&, int tile_q, const Launch&);
// out and lse of partial results: (split, token, head, column), and without the column.
void launch_merge(const QueryView&, const float* outs, const float* lses, int splits, const Device&, const Launch&);

// head_dim <= kTileD: 64, 128 or 256.
template <int kTileD> [[nodiscard]] Status launch_prefill(const Attention16Params&, const Device&, const Launch&);

}  // namespace flashq::cuda::sm90
