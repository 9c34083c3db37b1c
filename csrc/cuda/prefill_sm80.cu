// The host's side of the kernel in prefill_sm80.cuh.
#include <type_traits>

#include "cuda/prefill.h"
#include "cuda/prefill_sm80.h"

namespace flashq::cuda {
namespace {

// Calls f with the smallest instance for the head dim, as an integral constant.
template <class F> auto with_dim(int64_t head_dim, F f) {
  if (head_dim <= 64) return f(std::integral_constant<int, 64>());
  if (head_dim <= 128) return f(std::integral_constant<int, 128>());
  return f(std::integral_constant<int, 256>());
}

PrefillPlan plan(const Attention16Params& p) {
  return with_dim(p.query.head_dim, [&](auto dim) { return plan_prefill_sm80<dim()>(p); });
}

}  // namespace

int64_t prefill_sm80_scratch_bytes(const Attention16Params& p) {
  const PrefillPlan planned = plan(p);
  return planned.splits.bytes(planned.row_tiles * p.query.kv_heads);
}

Status prefill_sm80(const Attention16Params& p, const Device& device, const Launch& launch) {
  const QueryView& q = p.query;
  const PrefillPlan planned = plan(p);
  if (const int64_t blocks = planned.row_tiles * q.kv_heads; blocks > INT32_MAX)  // of a grid
    return refuse("q", "up to 2^31 - 1 tiles of rows", blocks);
  constexpr int64_t kSectionBytes = 32 << 20;  // of K and V in the L2 cache
  const int64_t keys = max_of<int64_t>(min_of(kv_capacity(p.kv), kSectionBytes), 1);
  const PrefillArguments args{.p = p,
                              .rule = ScoreRule(p.score),
                              .row_tiles = planned.row_tiles,
                              .section = max_of<int64_t>(kSectionBytes / (keys * q.head_dim * 4), 1),
                              .splits = planned.splits,
                              .ring = 0,
                              .narrow_q = !rows_fit_vectors(q.q, q.q_stride),
                              .narrow_kv =
                                  !rows_fit_vectors(p.kv.k, p.kv.k_stride) || !rows_fit_vectors(p.kv.v, p.kv.v_stride)};
  return with_dim(q.head_dim, [&](auto dim) { return launch_prefill_sm80<dim()>(args, device, launch); });
}

}  // namespace flashq::cuda
