// What the attention ops share: q with its outputs, options, and index tensors, checked and turned into Params.
#pragma once
#include "ops/launch.h"
#include "ops/ops.h"

namespace flashq {

// The options of MASK and CACHE (schemas.cpp).
struct ScoreArgs {
  std::optional<double> scale;
  bool causal;
  int64_t window_left, window_right;
  double softcap;
};
struct CacheArgs {
  const Tensor &q, &seqlens;
  const OptionalTensor &block_table, &cu_seqlens_q, &kv_start, &sinks;
  int64_t max_seqlen_q, kv_chunk;
  ScoreArgs score;
  OptionalDtype out_dtype;
};

// q alone: dtype, strides, device, head_dim. Shape (B, Sq, Hq, D), or packed (Tq, Hq, D).
[[nodiscard]] QueryView view_query(const Op& op, const Call& call, const Tensor& q, bool packed, int64_t kv_heads,
                                   const char* kv_argument);
// k or v (a cache or not): q's dtype, device and head_dim, unit last stride.
void expect_like_query(const Op& op, const char* argument, const Tensor& t, const Tensor& q, const char* q_name = "q");

[[nodiscard]] ScoreOptions view_score(const Op& op, const ScoreArgs& args, const OptionalTensor& sinks,
                                      const Tensor& q);

// Allocates out and lse and points the query's view at them.
[[nodiscard]] Results make_outputs(const Op& op, const Call& call, const Tensor& q, OptionalDtype out_dtype,
                                   QueryView& query);

// Everything of a cache op but the cache itself.
void fill_cache_params(const Op& op, const Call& call, const CacheArgs& args, int64_t kv_heads, const char* kv_argument,
                       AttentionParams& params);
// block_table (B, max_pages), or none: then a page a sequence has to exist.
void view_block_table(const Op& op, const OptionalTensor& table, const Tensor& q, int64_t batch, const char* cache,
                      int64_t num_pages, IndexView& view, int64_t& max_pages);

// cu_seqlens (B + 1); returns B.
[[nodiscard]] int64_t view_cu_seqlens(const Op& op, const char* argument, const Tensor& cu_seqlens, const Tensor& q,
                                      IndexView& view);

}  // namespace flashq
