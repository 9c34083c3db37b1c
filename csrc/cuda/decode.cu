// decode on CUDA: which kernel runs a call, how its work is cut, and where partial results lie in the scratch.
#include "cuda/decode/kernel.cuh"
#include "cuda/decode/launch.h"
#include "cuda/decode/merge_partials.h"
#include "cuda/decode/partials_layout.h"
#include "cuda/kernels.h"
#include "cuda/prefill.h"

namespace flashq::cuda {
namespace {

constexpr int kMaxStages = 4;
constexpr int64_t kWholeItem = 512;      // tokens: up to here no item is split, so that one launch does it all
constexpr int64_t kWholeUnit = 1 << 30;  // tokens of a unit that nothing exceeds

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

SplitConfig split_config(const Attention16Params& p, int shape, int warps) {
  const auto capacity = static_cast<int32_t>(kv_capacity(p.kv));
  const int32_t team_warps = 1 << kDecodeTeamShift[shape];
  SplitConfig c{.capacity = capacity,
                .unit = Divisor(kGroup * team_warps),
                .group = Divisor(p.query.q_heads / p.query.kv_heads),
                .block_rows = Divisor(kDecodeRows[shape]),
                .least_units = warps / team_warps,
                .unit_is_split = false};
  if (p.kv_chunk > 0 || capacity <= kWholeItem) {
    c.unit = Divisor(p.kv_chunk > 0 ? min_of<int64_t>(p.kv_chunk, kWholeUnit) : kWholeUnit);
    c.unit_is_split = true;
    c.least_units = 1;
  }
  return c;
}

// The kernel for most rows up to `how.shape` that fits shared memory, with most warps, then with most bytes in flight.
void choose_warps(DecodeLaunch& how, int32_t& stages, int64_t shared_bytes) {
  const int most = kDecodeDims[how.dim] > 128 ? 4 : 8;  // 64 KiB of tiles
  for (;; --how.shape)
    for (how.warps = most; how.warps >> kDecodeTeamShift[how.shape] > 0; how.warps /= 2)
      for (stages = kMaxStages; stages >= 2; --stages) {
        how.shared_bytes = decode_shared_bytes(how.dim, how.shape, how.warps, stages);
        if (how.shared_bytes <= shared_bytes) return;
      }
}

}  // namespace

int64_t decode_shared_bytes(int dim, int shape, int warps, int stages) {
  const auto bytes = [&]<int kDim>() -> int64_t {
    const int team_warps = 1 << kDecodeTeamShift[shape];
    return kDecodeTiles[shape] == 1 ? DecodeShared<kDim, 1>(warps, team_warps, stages).end
                                    : DecodeShared<kDim, 2>(warps, team_warps, stages).end;
  };
  if (dim == 0) return bytes.template operator()<64>();
  return dim == 1 ? bytes.template operator()<128>() : bytes.template operator()<256>();
}

int64_t attention_16_scratch_bytes(const Attention16Params& p, int32_t) {
  if (many_rows(p)) return prefill_scratch_bytes(p);
  if (p.query.total_tokens == 0 || p.query.q_heads == 0) return 0;
  const SplitConfig c = split_config(p, shape_index(p), 8);
  return splits(c) ? PartialsLayout(p, c).end : 0;
}

Status decode(const Attention16Params& p, const Launch& launch) {
  if (many_rows(p)) return prefill(p, launch);
  Device device{};
  if (const Status status = enter(launch, device); !status.ok()) return status;
  if (p.query.total_tokens == 0 || p.query.q_heads == 0) return {};
  DecodeLaunch how{};
  how.dim = dim_index(p.query.head_dim);
  how.shape = shape_index(p);
  how.ctas = static_cast<int>(min_of<int64_t>(device.sm_count, kMaxCtas));
  int32_t stages = 0;
  choose_warps(how, stages, device.shared_bytes);
  const SplitConfig split = split_config(p, how.shape, how.warps);
  const KvView& kv = p.kv;
  const DecodeParams params{.call = p,
                            .split = split,
                            .rule = ScoreRule(p.score),
                            .partials = place_partials(p, split),
                            .page_size = Divisor(clamp(kv.page_size, 1, kWholeUnit)),
                            .team_warps = 1 << kDecodeTeamShift[how.shape],
                            .team_shift = kDecodeTeamShift[how.shape],
                            .stages = stages,
                            .wide_q = rows_fit_vectors(p.query.q, p.query.q_stride),
                            .wide_kv = rows_fit_vectors(kv.k, kv.k_stride) && rows_fit_vectors(kv.v, kv.v_stride),
                            .whole_groups = !kv.block_table.given() || kv.page_size % kGroup == 0};
  const Status status =
      (p.query.dtype == Dtype::kFloat16 ? launch_decode_fp16 : launch_decode_bf16)(how, params, launch);
  if (!status.ok() || !params.partials.lists) return status;
  launch_merge_partials(p, params.partials, how.ctas, kDecodeRows[how.shape], launch);
  return launch_status();
}

}  // namespace flashq::cuda
