// tbq4_attention for many rows on Hopper: warp-specialised and persistent like prefill_sm90.cu, whose schedule it has.
//
// A producer warpgroup expands each tile of codes to fp16, once for the 128 rows of the CTA, in the layout that wgmma
// reads; two consumer warpgroups own 64 rows each. Everything happens in the rotated domain: a small kernel ahead
// rotates the queries, and consumers rotate their results back.
#include "cuda/overlapping_launch.h"
#include "cuda/prefill_sm90/launch.h"
#include "cuda/ptx/tensor_map.h"
#include "cuda/tbq4_prefill/launch.h"
#include "cuda/tbq4_prefill/prepare_queries.cuh"

namespace flashq::cuda {
namespace {

using namespace tbq4_sm90;
using sm90::kMostRows;
using sm90::pack_of;

constexpr int64_t kMostPartialBytes = 32 << 20;  // of the partial results of splits

int64_t query_tokens(const QueryView& q) { return q.cu_seqlens_q.given() ? q.total_tokens : q.q_len; }

// Into how many parts the keys of a tile of rows are split, by what the host knows, which is not the lengths.
int64_t count_splits(const AttentionTbq4Params& p) {
  const QueryView& q = p.query;
  const int64_t batch = q.cu_seqlens_q.given() ? 1 : q.batch;
  const int64_t tiles = ceil_div(query_tokens(q) * pack_of(q), kTileRows) * (q.q_heads / pack_of(q)) * batch;
  int64_t most = sm90::kMostSplits;
  if (p.score.window_left >= 0 && p.score.causal)
    most = min_of(most, max_of<int64_t>((p.score.window_left + kTileRows) / sm90::kLeastSplit, 1));
  most = min_of(most, max_of<int64_t>(kMostPartialBytes / (q.total_tokens * q.q_heads * q.head_dim * 4), 1));
  return sm90::best_splits(tiles, most);
}

// Bytes from the start of the scratch. Nothing grows with the context.
struct ScratchPlan {
  int64_t rows, high, rest, raw, partial_out, partial_lse, end;

  explicit ScratchPlan(const AttentionTbq4Params& p) {
    const QueryView& q = p.query;
    const int64_t count = q.total_tokens * q.q_heads, splits = count_splits(p), values = count * q.head_dim;
    const auto plan = static_cast<int64_t>(sizeof(sm90::Plan) + q.batch * sizeof(sm90::PlannedSequence));
    rows = round_up(plan, 128);
    high = round_up(rows + count * static_cast<int64_t>(sizeof(RowScale)), 128);
    rest = high + round_up(values * 2, 128);
    raw = rest + round_up(values * 2, 128);
    partial_out = raw + (p.kv.k_offsets ? round_up(values * 2, 128) : 0);
    partial_lse = partial_out + (splits > 1 ? splits * values * 4 : 0);
    end = partial_lse + (splits > 1 ? splits * count * 4 : 0);
  }
};

Schedule make_schedule(const AttentionTbq4Params& a, sm90::Plan* plan) {
  const int64_t key_bytes = a.query.head_dim + 4 * tbq4::blocks_per_row(a.query.head_dim);
  Schedule s = sm90::make_schedule(a, static_cast<int>(count_splits(a)), key_bytes);
  s.drawn = &plan->drawn;
  s.plan = plan;
  return s;
}

bool encode_queries(const uint16_t* data, const QueryView& q, int64_t pack, CUtensorMap& map) {
  const int64_t heads = q.q_heads, dim = q.head_dim;
  const TensorShape shape{.data = data,
                          .bfloat16 = false,
                          .size = {uint64_t(dim), uint64_t(pack), uint64_t(q.total_tokens), uint64_t(heads / pack), 1},
                          .stride = {dim, heads * dim, dim * pack, q.total_tokens * heads * dim},
                          .box = {64, uint32_t(pack), uint32_t(64 / pack), 1, 1}};
  return encode_tensor_map(shape, map);
}

// The planner of prefill_sm90 knows nothing of what keys look like.
Attention16Params plan_params(const AttentionTbq4Params& a) {
  Attention16Params plan{};
  static_cast<AttentionParams&>(plan) = a;
  plan.kv.num_pages = a.kv.num_pages;
  plan.kv.page_size = a.kv.page_size;
  plan.kv.block_table = a.kv.block_table;
  plan.kv.max_pages = a.kv.max_pages;
  return plan;
}

LevelBytes split_levels() {
  LevelBytes bytes{};
  for (int i = 0; i < tbq4::kMagnitudes; ++i) {
    const uint32_t bits = float_to_half(tbq4::kCentroids128[i] * kTableScale);
    bytes.low[i / 4] |= (bits & 0xff) << (i % 4 * 8);
    bytes.high[i / 4] |= (bits >> 8) << (i % 4 * 8);
  }
  return bytes;
}

template <int kDim> void launch_prepare(const PrepareParams& p, cudaStream_t stream) {
  const auto blocks = static_cast<unsigned>(ceil_div(p.query.total_tokens * p.query.q_heads * (kDim / 8), 128));
  if (p.query.dtype == Dtype::kFloat16)
    prepare_queries<Float16, kDim><<<blocks, 128, 0, stream>>>(p);
  else
    prepare_queries<Bfloat16, kDim><<<blocks, 128, 0, stream>>>(p);
}

}  // namespace

// By what was measured over 33,000 tokens: a tile of 128 rows takes 5.6 to 7.2 times as long as an item of the other
// kernel, and 1.5 times more where it is alone.
bool tbq4_prefill_wants(const AttentionTbq4Params& p) {
  const QueryView& q = p.query;
  const int64_t group = q.q_heads / q.kv_heads, pack = pack_of(q), tokens = query_tokens(q);
  const int64_t tiles = ceil_div(tokens * pack, kTileRows) * (group / pack);
  const int64_t items = ceil_div(tokens * group, q.head_dim == 256 ? 8 : 16);
  return p.kv_chunk == 0 && 13 * tiles + 3 < 2 * items;
}

bool tbq4_prefill_takes(const AttentionTbq4Params& p, const Device& device) {
  if (!runs_90a(device) || device.shared_bytes < sm90::kMostShared) return false;
  const QueryView& q = p.query;
  const Tbq4View& kv = p.kv;
  const int64_t rows = (q.total_tokens + q.batch) * q.q_heads;
  if (kv.page_size % 16 != 0 || kv.num_pages == 0 || kv.page_size == 0) return false;
  if (kv_capacity(kv) >= kMostRows || kv.num_pages >= kMostRows || rows >= kMostRows || q.batch >= kMostRows)
    return false;
  const uintptr_t planes =
      address_bits(kv.k_codes) | address_bits(kv.v_codes) | address_bits(kv.k_norms) | address_bits(kv.v_norms);
  return widest_vector(planes) == kVectorBytes;
}

int64_t tbq4_prefill_scratch_bytes(const AttentionTbq4Params& p) { return ScratchPlan(p).end; }

Status tbq4_prefill(const AttentionTbq4Params& a, const Device& device, const Launch& where) {
  const QueryView& q = a.query;
  const auto stream = static_cast<cudaStream_t>(where.stream);
  const ScratchPlan scratch(a);
  const auto at = [&](int64_t offset) { return static_cast<char*>(a.scratch) + offset; };
  const bool offsets = a.kv.k_offsets != nullptr;
  const int64_t pack = pack_of(q);
  const ScoreRule rule(a.score);
  // Of plain scores the factor is part of the norms, where their products stay far inside float32.
  const bool plain = rule.plain && rule.factor > 0x1p-60f && rule.factor < 0x1p60f;
  auto* const plan = static_cast<sm90::Plan*>(a.scratch);
  const PrepareParams prepare{.query = q,
                              .factor = rule.factor,
                              .scale = a.score.scale,
                              .row_factor = plain ? 1 : rule.factor,
                              .high = reinterpret_cast<uint16_t*>(at(scratch.high)),
                              .rest = reinterpret_cast<uint16_t*>(at(scratch.rest)),
                              .raw = offsets ? reinterpret_cast<uint16_t*>(at(scratch.raw)) : nullptr,
                              .rows = reinterpret_cast<RowScale*>(at(scratch.rows)),
                              .wide = rows_fit_vectors(q.q, q.q_stride)};
  Params p{.q = {},
           .raw_q = {},
           .schedule = make_schedule(a, plan),
           .call = a,
           .rule = rule,
           .page_size = Divisor(a.kv.page_size),
           .exact_page_size = Divisor(min_of<int64_t>(a.kv.exact.page_size, INT32_MAX)),
           .levels = split_levels(),
           .norm_factor = plain ? rule.factor : 1,
           .rows = prepare.rows,
           .q_rest = prepare.rest,
           .partial_out = reinterpret_cast<float*>(at(scratch.partial_out)),
           .partial_lse = reinterpret_cast<float*>(at(scratch.partial_lse)),
           .wide_offsets = rows_fit_vectors(a.kv.k_offsets, a.kv.k_offsets_stride),
           .wide_exact = rows_fit_vectors(a.kv.exact.k, a.kv.exact.k_stride) &&
                         rows_fit_vectors(a.kv.exact.v, a.kv.exact.v_stride),
           .exact =
               a.kv.exact.k != nullptr && a.kv.exact.page_size > 0 && (a.kv.exact_first > 0 || a.kv.exact_last > 0),
           .general = !plain};
  const Schedule& s = p.schedule;
  if (!encode_queries(prepare.high, q, pack, p.q) || (offsets && !encode_queries(prepare.raw, q, pack, p.raw_q)))
    return refuse_tensor_map();
  const auto prepare_rows = q.head_dim == 64    ? launch_prepare<64>
                            : q.head_dim == 128 ? launch_prepare<128>
                                                : launch_prepare<256>;
  prepare_rows(prepare, stream);
  sm90::launch_plan(plan_params(a), s, kTileRows, where);
  // At most: every sequence, and the rows behind the last one, ends in a partial tile.
  const int64_t tiles = (ceil_div(q.total_tokens * pack, kTileRows) + q.batch + 1) * s.head_packs;
  const auto start = q.head_dim == 64    ? launch_prefill<64>
                     : q.head_dim == 128 ? launch_prefill<128>
                                         : launch_prefill<256>;
  start(p, static_cast<unsigned>(min_of<int64_t>(device.sm_count, tiles * s.splits)), device, where);
  if (s.splits > 1) sm90::launch_merge(q, p.partial_out, p.partial_lse, s.splits, device, where);
  return launch_status();
}

}  // namespace flashq::cuda
