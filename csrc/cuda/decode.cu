// decode on CUDA: which kernel runs a call, how its work is cut, and where partial results lie in the scratch.
#include <bit>

#include "cuda/count_clusters.h"
#include "cuda/decode/kernel.cuh"
#include "cuda/decode/launch.h"
#include "cuda/decode/merge_partials.h"
#include "cuda/decode/partials_layout.h"
#include "cuda/kernels.h"
#include "cuda/overlapping_launch.h"
#include "cuda/prefill.h"

namespace flashq::cuda {
namespace {

constexpr int kMaxStages = 4;
constexpr int kItemUnits = 2;        // the start of an item takes about as long as two tiles
constexpr int kLeastUnits = 2;       // of a team: fewer would cost the merge more than they save
constexpr int64_t kWholeItem = 512;  // tokens: up to here no item is split, so that one launch does it all
constexpr int64_t kMostStride = INT32_MAX / 2 / kGroup;
constexpr int64_t kWholeUnit = 1 << 30;  // tokens of a unit that nothing exceeds

// One team of so many may be idle where items are divided evenly.
constexpr int kIdleOfMany = 16;  // of 8 of a multiprocessor that have up to 8 rows, and of those whose CTAs merge
constexpr int kIdleOfFew = 64;   // of others, where no CTA merges: they set the pace, not the memory
constexpr int kIdleOfRows = 32;  // of those with 64 rows whose CTAs merge

int dim_index(int64_t head_dim) {
  int i = 0;
  while (kDecodeDims[i] < head_dim) ++i;
  return i;
}

// The kernel for the rows of an item: all of a sequence's, as far as the host knows them, but 64 at most. With kv_chunk
// packed queries always get the largest, because a row's bits must not depend on its batch mates or on hints.
int shape_index(const Attention16Params& p) {
  const QueryView& q = p.query;
  const int64_t tokens = q.cu_seqlens_q.given() ? q.total_tokens : q.q_len, rows = tokens * (q.q_heads / q.kv_heads);
  if (q.cu_seqlens_q.given() && p.kv_chunk > 0) return kDecodeShapes - 1;
  int i = 0;
  while (i < kDecodeShapes - 1 && kDecodeRows[i] < rows) ++i;
  return i;
}

// Whether prefill's kernels run the call: they are made for many rows, and count in 64 bits. Of packed queries only the
// average is known; with kv_chunk they stay here, because a row's bits must not depend on its batch mates.
bool many_rows(const Attention16Params& p) {
  const QueryView& q = p.query;
  if (!p.seqlens.given()) return true;
  const int64_t group = q.q_heads / q.kv_heads;
  if (!fits_plan(p, kv_capacity(p.kv), kGroup, kDecodeRows[0])) return true;
  if (!q.cu_seqlens_q.given()) return q.q_len * group > kDecodeRows[kDecodeShapes - 1];
  return p.kv_chunk == 0 && q.total_tokens * group > kDecodeRows[kDecodeShapes - 1] * q.batch;
}

// Packed queries need the scan of the plan to find their items, and with kv_chunk the splits are given.
bool can_cluster(const Attention16Params& p) { return !p.query.cu_seqlens_q.given() && p.kv_chunk == 0; }

// CTAs of a cluster that computes an item and merges its partial results, so that one launch does it all; 0 where that
// would leave multiprocessors idle for too long: where items are too many, or too few for the length they may have.
int choose_cluster(const Attention16Params& p, int64_t block_rows, int64_t most, int64_t ctas) {
  constexpr int64_t kShort = 512;             // tokens of a CTA: one wave of copies or two
  constexpr int64_t kSmallBytes = 256 << 20;  // of a call: the second kernel costs more than 1 / 32 of its time
  constexpr int64_t kFastDim = 128;           // with up to 8 rows, half of the multiprocessors keep the memory busy
  if (!can_cluster(p)) return 0;
  const int64_t items = count_row_tiles(p.query, block_rows) * p.query.kv_heads, window = p.score.window_left;
  int64_t keys = kv_capacity(p.kv);  // that an item sees at most
  if (window != kUnlimited && window < keys - p.query.q_len) keys = window + p.query.q_len;
  int64_t cluster = 1;
  while (cluster * 2 <= most && items * cluster * 2 <= ctas) cluster *= 2;
  if (items > ctas) return 0;
  const bool fast = block_rows == kDecodeRows[0] && p.query.head_dim == kFastDim;
  const bool small = static_cast<double>(items) * static_cast<double>(keys) * 4 * p.query.head_dim <= kSmallBytes;
  const bool alike = p.query.batch == 1 && items * cluster * 32 >= ctas * 31 && (small || fast);  // all as long
  return keys <= kShort * cluster || alike ? static_cast<int>(cluster) : 0;
}

SplitConfig split_config(const Attention16Params& p, const DecodeLaunch& how) {
  const auto capacity = static_cast<int32_t>(kv_capacity(p.kv));
  SplitConfig c{.capacity = capacity,
                .unit = Divisor(kGroup << kDecodeTeamShift[how.shape]),
                .group = Divisor(p.query.q_heads / p.query.kv_heads),
                .block_rows = Divisor(kDecodeRows[how.shape]),
                .workers = how.teams(),
                .least_units = max_of(kLeastUnits >> kDecodeTeamShift[how.shape], 1),
                .item_units = kItemUnits,
                .unit_is_split = false};
  if (how.cluster > 0) return c;
  if (p.kv_chunk > 0 || capacity <= kWholeItem) {
    c.unit = Divisor(p.kv_chunk > 0 ? min_of<int64_t>(p.kv_chunk, kWholeUnit) : kWholeUnit);
    c.unit_is_split = true;
    c.least_units = 1;
    c.item_units = 0;
  }
  return c;
}

AlikeRule alike_rule(const DecodeLaunch& how, const SplitConfig& c) {
  if (c.unit_is_split)
    return {.least_workers = INT32_MAX, .least_merging = INT32_MAX, .cta_workers = 1, .merges_first = false};
  const int teams = how.teams();
  const bool many_rows = how.shape == kDecodeShapes - 1;  // their products set the pace, not the memory
  return {.least_workers = teams - teams / (how.shape == 0 && how.warps == 8 ? kIdleOfMany : kIdleOfFew),
          .least_merging = teams - teams / (many_rows ? kIdleOfRows : kIdleOfMany),
          .cta_workers = how.warps >> kDecodeTeamShift[how.shape],
          .merges_first = !many_rows};
}

// The kernel for most rows up to `how.shape` that fits shared memory, with most warps, then with most bytes in flight.
void choose_warps(DecodeLaunch& how, int64_t shared_bytes) {
  const int most = kDecodeDims[how.dim] > 128 ? 4 : 8;  // 64 KiB of tiles
  for (; how.shape >= 0; --how.shape)
    for (how.warps = most; how.warps >> kDecodeTeamShift[how.shape] > 0; how.warps /= 2)
      for (how.stages = kMaxStages; how.stages >= 2; --how.stages) {
        how.shared_bytes = decode_shared_bytes(how.dim, how.shape, how.warps, how.stages);
        if (how.shared_bytes <= shared_bytes) return;
      }
  // None does: the smallest, which decode() refuses.
  how.shape = 0;
  how.warps = 1;
  how.stages = 2;
}

DecodeLaunch choose(const Attention16Params& p, const Device& device, int32_t device_index) {
  DecodeLaunch how{};
  how.dim = dim_index(p.query.head_dim);
  how.shape = shape_index(p);
  how.ctas = static_cast<int>(min_of<int64_t>(device.sm_count, kMaxCtas));
  choose_warps(how, device.shared_bytes);
  const bool clusters = device.arch >= 90 && runs_code_of_90(device_index);
  how.cluster = choose_cluster(p, kDecodeRows[how.shape], clusters ? kMaxCluster : 1, how.ctas);
  how.wide = how.cluster == 0 && decode_goes_wide(how.dim, how.shape) && runs_90a(device);
  if (how.cluster == 0) return how;
  // What CTAs of a cluster send each other lies behind the rings, which may be short then.
  const int64_t rows = min_of<int64_t>(p.query.q_len * (p.query.q_heads / p.query.kv_heads), kDecodeRows[how.shape]);
  const int received = ReceivedParts::count_bytes(how.cluster, static_cast<int>(rows * p.query.head_dim / 4));
  const auto bytes = [&](int stages) { return decode_shared_bytes(how.dim, how.shape, how.warps, stages) + received; };
  int stages = how.stages;
  while (stages > 2 && bytes(stages) > device.shared_bytes) --stages;
  if (bytes(stages) > device.shared_bytes) {
    how.cluster = 0;
    return how;
  }
  how.stages = stages;
  how.shared_bytes = bytes(stages);
  how.ctas = static_cast<int>(count_row_tiles(p.query, kDecodeRows[how.shape]) * p.query.kv_heads) * how.cluster;
  return how;
}

// Rows for 16-byte loads, 16 of which lie within 2^31 bytes.
bool wide_rows(const void* base, const int64_t (&strides)[3]) {
  return rows_fit_vectors(base, strides) && strides[1] > -kMostStride && strides[1] < kMostStride;
}

}  // namespace

int64_t decode_shared_bytes(int dim, int shape, int warps, int stages) {
  const auto bytes = [&]<int kDim>() -> int64_t {
    return kDecodeTiles[shape] == 1 ? DecodeShared<kDim, 1>(warps, stages).end
                                    : DecodeShared<kDim, 2>(warps, stages).end;
  };
  if (dim == 0) return bytes.template operator()<64>();
  return dim == 1 ? bytes.template operator()<128>() : bytes.template operator()<256>();
}

int64_t attention_16_scratch_bytes(const Attention16Params& p, const Launch& launch) {
  if (many_rows(p)) return prefill_scratch_bytes(p, launch);
  if (p.query.empty()) return 0;
  Device device{};
  if (!enter(launch, device).ok()) return 0;  // decode() says why
  const DecodeLaunch how = choose(p, device, launch.device);
  const SplitConfig split = split_config(p, how);
  return how.cluster == 0 && splits(split) ? PartialsLayout(p, split).end : 0;
}

Status decode(const Attention16Params& p, const Launch& launch) {
  if (many_rows(p)) return prefill(p, launch);
  Device device{};
  if (const Status status = enter(launch, device); !status.ok()) return status;
  if (p.query.empty()) return {};
  const DecodeLaunch how = choose(p, device, launch.device);
  if (how.shared_bytes > device.shared_bytes) return refuse("device", kMoreShared, device.shared_bytes);
  const SplitConfig split = split_config(p, how);
  const KvView& kv = p.kv;
  const DecodeParams params{.call = p,
                            .split = split,
                            .rule = ScoreRule(p.score),
                            .alike = alike_rule(how, split),
                            .partials = how.cluster > 0 ? Partials{} : place_partials(p, split),
                            .page_size = Divisor(clamp(kv.page_size, 1, kWholeUnit)),
                            .row_blocks = Divisor(ceil_div(p.query.q_len * split.group.value, split.block_rows.value)),
                            .cluster_ctas = how.cluster,
                            .cluster_shift = std::countr_zero(static_cast<unsigned>(max_of(how.cluster, 1))),
                            .team_warps = 1 << kDecodeTeamShift[how.shape],
                            .team_shift = kDecodeTeamShift[how.shape],
                            .stages = how.stages,
                            .k_tile_bytes = kv.k_stride[1] * 2 * (kGroup << kDecodeTeamShift[how.shape]),
                            .v_tile_bytes = kv.v_stride[1] * 2 * (kGroup << kDecodeTeamShift[how.shape]),
                            .k_row_bytes = static_cast<int32_t>(kv.k_stride[1] * 2),
                            .v_row_bytes = static_cast<int32_t>(kv.v_stride[1] * 2),
                            .wide_q = rows_fit_vectors(p.query.q, p.query.q_stride),
                            .wide_kv = wide_rows(kv.k, kv.k_stride) && wide_rows(kv.v, kv.v_stride),
                            .whole_groups = !kv.block_table.given() || kv.page_size % kGroup == 0};
  const Status status =
      (p.query.dtype == Dtype::kFloat16 ? launch_decode_fp16 : launch_decode_bf16)(how, params, launch);
  if (!status.ok() || !params.partials.given()) return status;
  launch_merge_partials(p, split, params.alike, params.partials, launch);
  return launch_status();
}

}  // namespace flashq::cuda
