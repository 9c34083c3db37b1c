// tbq4_attention on CUDA: which kernel runs a call, how its work is cut, and how much shared memory it takes.
#include <cstdio>

#include "cuda/decode/merge_partials.h"
#include "cuda/decode/partials_layout.h"
#include "cuda/kernels.h"
#include "cuda/tbq4_attention/launch.h"
#include "cuda/tbq4_attention/shared.cuh"

namespace flashq::cuda {
namespace {

constexpr int kMaxStages = 4;
constexpr int64_t kWholeItem = 512;      // tokens: up to here no item is split, so that one launch does it all
constexpr int64_t kWholeUnit = 1 << 30;  // tokens of a unit that nothing exceeds
constexpr int64_t kMostTokens = INT32_MAX - 4095;  // of a sequence: the plan counts in 32 bits

// 8-row tiles of an item. With kv_chunk packed queries always get the most, because a row's bits must not depend on its
// batch mates.
int row_tiles(const AttentionTbq4Params& p) {
  const QueryView& q = p.query;
  const int most = most_code_tiles(q.head_dim);
  const bool packed = q.cu_seqlens_q.given();
  const int64_t rows = (packed ? q.total_tokens : q.q_len) * (q.q_heads / q.kv_heads);
  return rows > 8 || (packed && p.kv_chunk > 0) ? most : 1;
}

// Of an item.
int most_rows(const AttentionTbq4Params& p) {
  const QueryView& q = p.query;
  const int64_t tokens = q.cu_seqlens_q.given() ? q.total_tokens : q.q_len;
  return static_cast<int>(min_of<int64_t>(tokens * (q.q_heads / q.kv_heads), row_tiles(p) * 8));
}

SplitConfig split_config(const AttentionTbq4Params& p, int64_t ctas, int warps) {
  const int64_t capacity = min_of(kv_capacity(p.kv), kMostTokens), rows = row_tiles(p) * 8;
  int64_t unit = 4096 / p.query.head_dim;  // a warp's tile
  const bool whole = p.kv_chunk > 0 || capacity <= kWholeItem;
  if (whole)
    unit = p.kv_chunk > 0 ? min_of<int64_t>(p.kv_chunk, kWholeUnit) : kWholeUnit;
  else
    while (unit < kWholeUnit && !fits_plan(p, capacity, unit, rows)) unit *= 2;
  return {.capacity = static_cast<int32_t>(capacity),
          .unit = Divisor(unit),
          .group = Divisor(p.query.q_heads / p.query.kv_heads),
          .block_rows = Divisor(rows),
          .workers = static_cast<int32_t>(ctas),
          .least_units = whole ? 1 : warps,
          .item_units = 0,
          .unit_is_split = whole};
}

SharedPlan plan_shared(int64_t head_dim, const CodeLaunch& how, int stages, int rows, bool offsets) {
  const auto plan = [&]<int D>() {
    return how.tiles == 1 ? lay_out_shared<D, 1>(how.warps, stages, rows, offsets)
                          : lay_out_shared<D, 2>(how.warps, stages, rows, offsets);
  };
  if (head_dim == 64) return plan.template operator()<64>();
  return head_dim == 128 ? plan.template operator()<128>() : plan.template operator()<256>();
}

// The most warps, then the most tiles in flight, that fit shared memory.
bool choose_warps(int64_t head_dim, int rows, bool offsets, int64_t shared_bytes, CodeLaunch& how, int32_t& stages,
                  SharedPlan& plan) {
  for (how.warps = most_code_warps(head_dim, how.tiles); how.warps >= 2; how.warps -= how.warps > 4 ? 2 : 1)
    for (stages = kMaxStages; stages >= 2; --stages) {
      plan = plan_shared(head_dim, how, stages, rows, offsets);
      how.shared_bytes = plan.end;
      if (how.shared_bytes <= shared_bytes) return true;
    }
  return false;
}

Status refuse(const char* argument, const char* expected, int64_t got) {
  Status status;
  std::snprintf(status.message, sizeof status.message, "%s: expected %s, got %lld", argument, expected,
                static_cast<long long>(got));
  return status;
}

}  // namespace

int64_t attention_tbq4_scratch_bytes(const AttentionTbq4Params& p, int32_t) {
  if (p.query.total_tokens == 0 || p.query.q_heads == 0) return 0;
  const SplitConfig c = split_config(p, kMaxCtas, 8);
  return splits(c) ? PartialsLayout(p, c).end : 0;
}

Status tbq4_attention(const AttentionTbq4Params& p, const Launch& launch) {
  Device device{};
  if (const Status status = enter(launch, device); !status.ok()) return status;
  if (p.query.total_tokens == 0 || p.query.q_heads == 0) return {};
  const Tbq4View& kv = p.kv;
  if (kv_capacity(kv) > kMostTokens)
    return refuse("block_table", "room for less than 2^31 - 4095 tokens a sequence", kv_capacity(kv));
  CodeLaunch how{};
  how.tiles = row_tiles(p);
  how.ctas = static_cast<int>(min_of<int64_t>(device.sm_count, kMaxCtas));
  int32_t stages = 0;
  const bool offsets = kv.k_offsets != nullptr;
  const int rows = most_rows(p);
  SharedPlan plan{};
  if (!choose_warps(p.query.head_dim, rows, offsets, device.shared_bytes, how, stages, plan))
    return refuse("device", "a GPU with 96 KiB of shared memory for a block", device.shared_bytes);
  const SplitConfig split = split_config(p, how.ctas, how.warps);
  if (!fits_plan(p, split.capacity, split.unit.value, split.block_rows.value))
    return refuse("q", "fewer query tokens times keys", p.query.total_tokens);
  const ScoreRule rule(p.score);
  const uintptr_t codes = address_bits(kv.k_codes) | address_bits(kv.v_codes);
  const uintptr_t norms = address_bits(kv.k_norms) | address_bits(kv.v_norms);
  const CodeParams params{.call = p,
                          .split = split,
                          .rule = rule,
                          .partials = place_partials(p, split),
                          .at = plan,
                          .page_size = Divisor(clamp(kv.page_size, 1, kWholeUnit)),
                          .exact_page_size = Divisor(clamp(kv.exact.page_size, 1, kWholeUnit)),
                          .stages = stages,
                          .rows = rows,
                          .whole_groups = kv.page_size % 16 == 0 && widest_vector(codes | norms) == kVectorBytes,
                          .wide_codes = widest_vector(codes) == kVectorBytes,
                          .wide_offsets = rows_fit_vectors(kv.k_offsets, kv.k_offsets_stride),
                          .wide_q = rows_fit_vectors(p.query.q, p.query.q_stride),
                          .wide_exact = rows_fit_vectors(kv.exact.k, kv.exact.k_stride) &&
                                        rows_fit_vectors(kv.exact.v, kv.exact.v_stride),
                          .exact = kv.exact.k != nullptr && (kv.exact_first > 0 || kv.exact_last > 0),
                          .plain = !rule.capped && rule.last == 1};
  const auto start = p.query.head_dim == 64    ? launch_code_attention<64>
                     : p.query.head_dim == 128 ? launch_code_attention<128>
                                               : launch_code_attention<256>;
  const Status status = start(how, params, launch);
  if (!status.ok() || !params.partials.given()) return status;
  launch_merge_partials(p, split, params.partials, launch);
  return launch_status();
}

}  // namespace flashq::cuda
