// tbq4_attention on CUDA: which kernel runs a call, how its work is cut, and how much shared memory it takes.
#include <bit>

#include "cuda/count_clusters.h"
#include "cuda/decode/merge_partials.h"
#include "cuda/kernels.h"
#include "cuda/tbq4_attention/launch.h"
#include "cuda/tbq4_attention/merge.h"
#include "cuda/tbq4_attention/shared.cuh"
#include "cuda/tbq4_attention/slots.cuh"
#include "cuda/tbq4_prefill/launch.h"

namespace flashq::cuda {
namespace {

constexpr int64_t kMaxCtas = 192;  // one for each multiprocessor: GPUs have at most so many
constexpr int kLeastUnits = 2;     // of a warp: fewer would cost the merge more than they save
constexpr int kMostClusterWarps = 8;
constexpr int64_t kWholeItem = 512;                // tokens: up to here no item is split
constexpr double kMostRows = 0x1p32 - 1;           // of a plane, where rows are counted in 32 bits
constexpr int64_t kWholeUnit = 1 << 30;            // tokens of a unit that nothing exceeds
constexpr int64_t kMostTokens = INT32_MAX - 4095;  // of a sequence: the plan counts in 32 bits

template <int D, int kTiles> struct CodeShape {};

// 8-row tiles of an item. With kv_chunk packed queries always get the most, because a row's bits must not depend on its
// batch mates.
int row_tiles(const AttentionTbq4Params& p) {
  const QueryView& q = p.query;
  const int most = most_code_tiles(q.head_dim);
  const bool packed = q.cu_seqlens_q.given();
  const int64_t rows = (packed ? q.total_tokens : q.q_len) * (q.q_heads / q.kv_heads);
  return rows > 8 || (packed && p.kv_chunk > 0) ? most : 1;
}

// Of a sequence.
int64_t most_queries(const QueryView& q) { return q.cu_seqlens_q.given() ? q.total_tokens : q.q_len; }
// Of an item.
int most_rows(const AttentionTbq4Params& p) {
  const QueryView& q = p.query;
  return static_cast<int>(min_of<int64_t>(most_queries(q) * (q.q_heads / q.kv_heads), row_tiles(p) * 8));
}

// CTAs of a cluster that computes an item and merges its partial results, so that one launch does it all; 0 where that
// would leave multiprocessors idle for too long, and where the plan has to be searched for items.
int choose_cluster(const AttentionTbq4Params& p, int most, int64_t ctas, bool exact) {
  constexpr int64_t kShort = 512;  // tokens of a CTA
  if (p.query.cu_seqlens_q.given() || p.kv_chunk > 0 || exact) return 0;
  const int64_t items = most_items(p.query, row_tiles(p) * 8), window = p.score.window_left;
  if (items > ctas) return 0;
  int64_t keys = kv_capacity(p.kv);  // that an item sees at most
  if (window != kUnlimited && window < keys - p.query.q_len) keys = window + p.query.q_len;
  int cluster = 1;
  while (cluster * 2 <= most && items * cluster * 2 <= ctas) cluster *= 2;
  return keys <= kShort * cluster ? cluster : 0;
}

// How many tiles the start of an item takes as long as, for a warp that does it alone.
int item_units(const AttentionTbq4Params& p) {
  constexpr double kStart = 3.5, kRow = .6;                 // us
  const double tile = p.query.head_dim == 256 ? 1.1 : 1.5;  // us
  return static_cast<int>(min_of((kStart + kRow * most_rows(p)) / tile + .5, double{kMostItemUnits}));
}

SplitConfig split_config(const AttentionTbq4Params& p, int64_t workers, bool cluster) {
  const int64_t capacity = min_of(kv_capacity(p.kv), kMostTokens), rows = row_tiles(p) * 8;
  int64_t unit = 4096 / p.query.head_dim;  // a warp's tile
  const bool whole = !cluster && (p.kv_chunk > 0 || capacity <= kWholeItem);
  if (whole)
    unit = p.kv_chunk > 0 ? min_of<int64_t>(p.kv_chunk, kWholeUnit) : kWholeUnit;
  else
    while (unit < kWholeUnit && !fits_plan(p, capacity, unit, rows)) unit *= 2;
  return {.capacity = static_cast<int32_t>(capacity),
          .unit = Divisor(unit),
          .group = Divisor(p.query.q_heads / p.query.kv_heads),
          .block_rows = Divisor(rows),
          .workers = static_cast<int32_t>(workers),
          .least_units = whole ? 1 : kLeastUnits,
          .item_units = whole     ? 0
                        : cluster ? 1
                                  : item_units(p),
          .unit_is_split = whole};
}

// Shares of the plan that have work, at most.
int64_t most_shares(const AttentionTbq4Params& p) {
  const SplitConfig c = split_config(p, 1, false);
  const double units = static_cast<double>(ceil_div(c.capacity, c.unit.value) + c.item_units) *
                       static_cast<double>(most_items(p.query, c.block_rows.value)) / c.least_units;
  return static_cast<int64_t>(min_of(units + 1, 0x1p30));
}

bool has_exact(const Tbq4View& kv) { return kv.exact.k != nullptr && (kv.exact_first > 0 || kv.exact_last > 0); }

// Warps that share the exact tokens of 8 rows. Not more with more queries: a row's bits must not depend on them.
int exact_parts(const Tbq4View& kv) {
  constexpr int kMostParts = 8;
  constexpr int64_t kGroups = 8;  // of 16 tokens, of a warp
  const int64_t groups = ceil_div(kv.exact_first, 16) + ceil_div(kv.exact_last, 16) + 2;
  int parts = 1;
  while (parts < kMostParts && parts * kGroups < groups) parts *= 2;
  return parts;
}

// CTAs that compute exact tokens only: a warp has about as many tasks as it can do while the others stream.
int choose_exact_ctas(const AttentionTbq4Params& p, int64_t tasks, const CodeLaunch& how) {
  constexpr double kFixed = 12, kBytes = 3.4e6, kTask = 32;  // us of a call, bytes of the cache a us, us of a task
  const double values =
      static_cast<double>(p.query.batch * p.query.kv_heads * p.query.head_dim) * static_cast<double>(kv_capacity(p.kv));
  const double each = max_of((kFixed + values / kBytes) / kTask, 1.) * how.warps;
  const auto wanted = static_cast<int64_t>(min_of(static_cast<double>(tasks) / each, 0x1p30)) + 1;
  return static_cast<int>(min_of<int64_t>(wanted, max_of(how.ctas / 4, 1)));
}

// Slots (slots.cuh), their states before their values.
struct CodePartials {
  int64_t exact;   // the first slot of exact tokens
  int64_t o, end;  // bytes from the scratch's start

  CodePartials(const AttentionTbq4Params& p, const SplitConfig& c) {
    constexpr double kMost = 0x1p50;  // no allocator has it, and the sums below do not overflow
    const auto items = static_cast<double>(most_items(p.query, c.block_rows.value));
    const double codes =
        c.unit_is_split ? items * static_cast<double>(ceil_div(c.capacity, c.unit.value)) : 2.0 * c.workers + items;
    const double bound = codes + (has_exact(p.kv) ? items * exact_parts(p.kv) : 0);
    exact = static_cast<int64_t>(min_of(codes, kMost));
    const auto slots = static_cast<int64_t>(min_of(bound, kMost));
    o = round_up(slots * c.block_rows.value * static_cast<int64_t>(sizeof(SoftmaxState<Binary>)), 64);
    end = bound > kMost ? int64_t{1} << 60 : o + slots * c.block_rows.value * p.query.head_dim * 4;
  }
};

template <class Function> auto with_shape(int64_t head_dim, int tiles, Function function) {
  if (head_dim == 64) return tiles == 1 ? function(CodeShape<64, 1>{}) : function(CodeShape<64, 2>{});
  if (head_dim == 128) return tiles == 1 ? function(CodeShape<128, 1>{}) : function(CodeShape<128, 2>{});
  return function(CodeShape<256, 1>{});
}
SharedPlan plan_shared(int64_t head_dim, const CodeLaunch& how, int rows, bool offsets) {
  return with_shape(head_dim, how.tiles, [&]<int D, int kTiles>(CodeShape<D, kTiles>) {
    return lay_out_shared<D, kTiles>(how.warps, rows, offsets);
  });
}

// As many warps, up to `most`, as fit shared memory.
bool choose_warps(int64_t head_dim, int most, int rows, bool offsets, int64_t shared_bytes, CodeLaunch& how,
                  SharedPlan& plan) {
  for (how.warps = most; how.warps > 0; how.warps -= how.warps > 4 ? 2 : 1) {
    plan = plan_shared(head_dim, how, rows, offsets);
    how.shared_bytes = plan.end;
    if (how.shared_bytes <= shared_bytes) return true;
  }
  return false;
}

}  // namespace

int64_t attention_tbq4_scratch_bytes(const AttentionTbq4Params& p, const Launch&) {
  if (p.query.empty()) return 0;
  // The device is not known here: enough for the most multiprocessors and warps.
  const int64_t workers = kMaxCtas * most_code_warps(p.query.head_dim, row_tiles(p));
  const int64_t partials = CodePartials(p, split_config(p, workers, false)).end;
  return tbq4_prefill_wants(p) ? max_of(partials, tbq4_prefill_scratch_bytes(p)) : partials;
}

Status tbq4_attention(const AttentionTbq4Params& p, const Launch& launch) {
  Device device{};
  if (const Status status = enter(launch, device); !status.ok()) return status;
  if (p.query.empty()) return {};
  if (tbq4_prefill_wants(p) && tbq4_prefill_takes(p, device)) return tbq4_prefill(p, device, launch);
  const Tbq4View& kv = p.kv;
  if (kv_capacity(kv) > kMostTokens)
    return refuse("block_table", "room for less than 2^31 - 4095 tokens a sequence", kv_capacity(kv));
  CodeLaunch how{};
  how.tiles = row_tiles(p);
  how.ctas = static_cast<int>(min_of<int64_t>(device.sm_count, kMaxCtas));
  const int rows = most_rows(p);
  const uintptr_t codes = address_bits(kv.k_codes) | address_bits(kv.v_codes);
  const uintptr_t norms = address_bits(kv.k_norms) | address_bits(kv.v_norms);
  const double plane_rows =
      static_cast<double>(kv.num_pages) * static_cast<double>(kv.page_size) * static_cast<double>(p.query.kv_heads);
  const bool whole_groups =
      kv.page_size % 16 == 0 && widest_vector(codes | norms) == kVectorBytes && plane_rows < kMostRows;
  SharedPlan plan{};
  const bool exact = has_exact(kv);
  const bool clusters = device.arch >= 90 && runs_code_of_90(launch.device);
  const int cluster = choose_cluster(p, clusters ? kMaxCluster : 1, how.ctas, exact);
  // Of a short context more warps have too little to do each.
  const int most_warps = cluster > 0 ? kMostClusterWarps : most_code_warps(p.query.head_dim, how.tiles);
  if (!choose_warps(p.query.head_dim, most_warps, rows, kv.k_offsets != nullptr, device.shared_bytes, how, plan))
    return refuse("device", "a GPU with 96 KiB of shared memory for a block", device.shared_bytes);
  if (cluster > 0) {
    how.ctas = static_cast<int>(most_items(p.query, how.tiles * 8)) * cluster;
  } else if (const int64_t shares = most_shares(p); shares < int64_t{how.ctas} * how.warps) {
    how.warps = static_cast<int>(max_of<int64_t>(ceil_div(shares, how.ctas), 1));  // not all of them in a few CTAs
  }
  const int parts = exact ? exact_parts(kv) : 0;
  const int64_t group = p.query.q_heads / p.query.kv_heads, item_rows = how.tiles * 8;
  const int64_t eights = ceil_div(min_of(group, item_rows), 8);
  const int64_t touched = item_rows % group == 0 ? item_rows / group : ceil_div(item_rows - 1, group) + 1;
  const int64_t queries = min_of(touched, most_queries(p.query));
  const int64_t exact_tasks = most_items(p.query, item_rows) * queries * eights * parts;
  int code_ctas = how.ctas;
  if (exact) {
    const int exact_ctas = choose_exact_ctas(p, exact_tasks, how);
    code_ctas = max_of(how.ctas - exact_ctas, 1);
    how.ctas = code_ctas + exact_ctas;
  }
  const SplitConfig split = split_config(p, int64_t{code_ctas} * how.warps, cluster > 0);
  if (!fits_plan(p, split.capacity, split.unit.value, split.block_rows.value) || exact_tasks > INT32_MAX)
    return refuse("q", "fewer query tokens times keys", p.query.total_tokens);
  const CodePartials layout(p, split);
  auto* const scratch = static_cast<char*>(p.scratch);
  const ScoreRule rule(p.score);
  const CodeParams params{.call = p,
                          .split = split,
                          .rule = rule,
                          .partials = {.states = reinterpret_cast<SoftmaxState<Binary>*>(scratch),
                                       .o = reinterpret_cast<float*>(scratch + layout.o),
                                       .block_rows = static_cast<int32_t>(split.block_rows.value),
                                       .head_dim = static_cast<int32_t>(p.query.head_dim)},
                          .at = plan,
                          .page_size = Divisor(clamp(kv.page_size, 1, kWholeUnit)),
                          .exact_page_size = Divisor(clamp(kv.exact.page_size, 1, kWholeUnit)),
                          .row_blocks = Divisor(ceil_div(p.query.q_len * split.group.value, split.block_rows.value)),
                          .cluster_ctas = cluster,
                          .cluster_shift = std::countr_zero(static_cast<unsigned>(max_of(cluster, 1))),
                          .rows = rows,
                          .code_ctas = code_ctas,
                          .exact_slot = static_cast<int32_t>(layout.exact),
                          .exact_queries = static_cast<int32_t>(queries),
                          .exact_eights = static_cast<int32_t>(eights),
                          .exact_parts = parts,
                          .exact_tasks = static_cast<int32_t>(exact_tasks),
                          .page_scores = kv.k_offsets != nullptr && whole_groups,
                          .whole_groups = whole_groups,
                          .wide_codes = widest_vector(codes) == kVectorBytes,
                          .wide_offsets = rows_fit_vectors(kv.k_offsets, kv.k_offsets_stride),
                          .wide_q = rows_fit_vectors(p.query.q, p.query.q_stride),
                          .wide_exact = rows_fit_vectors(kv.exact.k, kv.exact.k_stride) &&
                                        rows_fit_vectors(kv.exact.v, kv.exact.v_stride),
                          .exact = exact,
                          .curved = rule.capped || rule.last != 1,
                          .straight = !rule.capped && rule.last == 1 && !kv.k_offsets};
  const auto start = p.query.head_dim == 64    ? launch_code_attention<64>
                     : p.query.head_dim == 128 ? launch_code_attention<128>
                                               : launch_code_attention<256>;
  const Status status = start(how, params, launch);
  if (!status.ok() || cluster > 0) return status;
  launch_merge_codes(params, device, launch);
  return launch_status();
}

}  // namespace flashq::cuda
