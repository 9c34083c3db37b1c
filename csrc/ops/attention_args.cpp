#include "ops/attention_args.h"

#include <cmath>

#include "core/mask.h"

namespace flashq {
namespace {

// Far beyond any position, and far from overflow when a position is added.
constexpr int64_t kWidestWindow = int64_t{1} << 40;

int64_t view_window(const Op& op, const char* argument, int64_t window) {
  expect_at_least(op, argument, window, kUnlimited);
  return min_of(window, kWidestWindow);
}

}  // namespace

void expect_like_query(const Op& op, const char* argument, const Tensor& t, const Tensor& q, const char* q_name) {
  expect_same_dtype(op, argument, t, q_name, q);
  expect_same_device(op, argument, t, q_name, q);
  if (t.dim() > 0 && q.dim() > 0 && t.size(t.dim() - 1) != q.size(q.dim() - 1))
    op.refuse(argument, "head_dim " + std::to_string(q.size(q.dim() - 1)) + ", as " + q_name + " has",
              "head_dim " + std::to_string(t.size(t.dim() - 1)));
  expect_unit_last_stride(op, argument, t);
}

QueryView view_query(const Op& op, const Call& call, const Tensor& q, bool packed, int64_t kv_heads,
                     const char* kv_argument) {
  QueryView view{};
  view.dtype = expect_float_dtype(op, "q", q, call.on_cpu());
  if (packed)
    expect_shape(op, "q", q, {{"Tq"}, {"Hq"}, {"D"}});
  else
    expect_shape(op, "q", q, {{"B"}, {"Sq"}, {"Hq"}, {"D"}});
  const int64_t token = packed ? 0 : 1;  // the dimension of tokens
  expect_unit_last_stride(op, "q", q);
  expect_head_dim(op, "q", q.size(token + 2));
  expect_head_groups(op, q.size(token + 1), kv_argument, kv_heads);
  view.q = q.const_data_ptr();
  view.batch = packed ? 0 : q.size(0);  // of packed queries: cu_seqlens_q's
  view.q_len = packed ? 0 : q.size(1);
  view.total_tokens = packed ? q.size(0) : q.size(0) * q.size(1);
  view.q_heads = q.size(token + 1);
  view.kv_heads = kv_heads;
  view.head_dim = q.size(token + 2);
  view.q_stride[0] = packed ? 0 : q.stride(0);
  view.q_stride[1] = q.stride(token);
  view.q_stride[2] = q.stride(token + 1);
  return view;
}

ScoreOptions view_score(const Op& op, const ScoreArgs& args, const OptionalTensor& sinks, const Tensor& q) {
  ScoreOptions options{};
  const int64_t heads = q.size(q.dim() - 2), head_dim = q.size(q.dim() - 1);
  options.scale = static_cast<float>(args.scale.value_or(1 / std::sqrt(static_cast<double>(head_dim))));
  if (!std::isfinite(options.scale)) op.refuse("scale", "a finite float32", to_text(*args.scale));
  options.softcap = static_cast<float>(args.softcap);
  // One that float32 rounds to 0 would be off, instead of flattening all scores.
  if (!(args.softcap >= 0 && std::isfinite(options.softcap) && (options.softcap > 0) == (args.softcap > 0)))
    op.refuse("softcap", "a finite float32 of at least 0 (0: off)", to_text(args.softcap));
  options.causal = args.causal;
  options.window_left = view_window(op, "window_left", args.window_left);
  options.window_right = view_window(op, "window_right", args.window_right);
  if (sinks) {
    expect_dtype(op, "sinks", *sinks, {ScalarType::Float});
    expect_same_device(op, "sinks", *sinks, "q", q);
    expect_shape(op, "sinks", *sinks, {{"Hq", heads}});
    options.sinks = static_cast<const float*>(sinks->const_data_ptr());
    options.sinks_stride = sinks->stride(0);
  }
  return options;
}

Results make_outputs(const Op& op, const Call& call, const Tensor& q, OptionalDtype out_dtype, QueryView& query) {
  const ScalarType dtype = out_dtype.value_or(q.scalar_type());
  if (dtype != q.scalar_type() && dtype != ScalarType::Float)
    op.refuse("out_dtype", "None, q's dtype (" + to_text(q.scalar_type()) + ") or torch.float32", to_text(dtype));
  const bool packed = q.dim() == 3;
  const int64_t heads = query.q_heads;
  const int64_t tokens = packed ? query.total_tokens : query.q_len;  // of a row of lse
  Tensor out = call.empty(q.sizes(), dtype);
  Tensor lse = packed ? call.empty({heads, tokens}, ScalarType::Float)
                      : call.empty({query.batch, heads, tokens}, ScalarType::Float);
  query.out = out.mutable_data_ptr();
  query.lse = static_cast<float*>(lse.mutable_data_ptr());
  query.out_dtype = dtype == q.scalar_type() ? query.dtype : Dtype::kFloat32;
  const int64_t token_stride = heads * query.head_dim;
  query.out_stride[0] = packed ? 0 : tokens * token_stride;
  query.out_stride[1] = token_stride;
  query.out_stride[2] = query.head_dim;
  query.lse_stride[0] = packed ? 0 : heads * tokens;
  query.lse_stride[1] = tokens;
  query.lse_stride[2] = 1;
  return {out, lse};
}

void fill_cache_params(const Op& op, const Call& call, const CacheArgs& args, int64_t kv_heads, const char* kv_argument,
                       AttentionParams& params) {
  const bool packed = args.cu_seqlens_q.has_value();
  params.query = view_query(op, call, args.q, packed, kv_heads, kv_argument);
  params.score = view_score(op, args.score, args.sinks, args.q);
  if (packed)
    params.query.batch = view_cu_seqlens(op, "cu_seqlens_q", *args.cu_seqlens_q, args.q, params.query.cu_seqlens_q);
  const int64_t batch = params.query.batch;
  params.seqlens = index_view(op, "seqlens", args.seqlens, {{"B", batch}}, "q", args.q);
  if (args.kv_start) params.kv_start = index_view(op, "kv_start", *args.kv_start, {{"B", batch}}, "q", args.q);
  expect_at_least(op, "max_seqlen_q", args.max_seqlen_q, 0);
  if (args.kv_chunk != 0 && (args.kv_chunk < 256 || args.kv_chunk % 64 != 0))
    op.refuse("kv_chunk", "0 (automatic) or a multiple of 64 of at least 256", std::to_string(args.kv_chunk));
  params.kv_chunk = min_of(args.kv_chunk, kWidestWindow);
}

void view_block_table(const Op& op, const OptionalTensor& table, const Tensor& q, int64_t batch, const char* cache,
                      int64_t num_pages, IndexView& view, int64_t& max_pages) {
  if (!table) {
    if (num_pages < batch)
      op.refuse(cache, "at least one page a sequence (" + std::to_string(batch) + "), because there is no block_table",
                std::to_string(num_pages) + " pages");
    return;
  }
  view = index_view(op, "block_table", *table, {{"B", batch}, {"max_pages"}}, "q", q);
  max_pages = table->size(1);
}

int64_t view_cu_seqlens(const Op& op, const char* argument, const Tensor& cu_seqlens, const Tensor& q,
                        IndexView& view) {
  view = index_view(op, argument, cu_seqlens, {{"B + 1"}}, "q", q);
  if (cu_seqlens.size(0) < 1) op.refuse(argument, "at least one element", "shape (0,)");
  return cu_seqlens.size(0) - 1;
}

}  // namespace flashq
