#include "ops/attention_args.h"

namespace flashq {
namespace {

// k or v (B, Sk, Hkv, D) as a cache of one page a sequence; packed (Tk, Hkv, D) as one page that all sequences share.
void view_dense(const Tensor& t, bool packed, const void*& data, int64_t (&stride)[3]) {
  const int64_t token = packed ? 0 : 1;
  data = t.const_data_ptr();
  stride[0] = packed ? 0 : t.stride(0);
  stride[1] = t.stride(token);
  stride[2] = t.stride(token + 1);
}

void fill_dense(const Op& op, const Call& call, const Tensor& q, const Tensor& k, const Tensor& v, bool packed,
                const OptionalTensor& sinks, const ScoreArgs& score, Attention16Params& params) {
  const int64_t token = packed ? 0 : 1;
  if (k.dim() != token + 3)
    op.refuse("k", packed ? "shape (Tk, Hkv, D)" : "shape (B, Sk, Hkv, D)", "shape " + shape_of(k));
  const int64_t keys = k.size(token), kv_heads = k.size(token + 1);
  params.query = view_query(op, call, q, packed, kv_heads, "k");
  const int64_t batch = params.query.batch, head_dim = params.query.head_dim;
  for (const auto& [name, t] : {std::pair{"k", &k}, std::pair{"v", &v}}) {
    expect_like_query(op, name, *t, q);
    if (packed)
      expect_shape(op, name, *t, {{"Tk", keys}, {"Hkv", kv_heads}, {"D", head_dim}});
    else
      expect_shape(op, name, *t, {{"B", batch}, {"Sk", keys}, {"Hkv", kv_heads}, {"D", head_dim}});
  }
  params.score = view_score(op, score, sinks, q);
  view_dense(k, packed, params.kv.k, params.kv.k_stride);
  view_dense(v, packed, params.kv.v, params.kv.v_stride);
  params.kv.num_pages = packed ? 1 : batch;
  params.kv.page_size = keys;
}

}  // namespace

Results prefill(const Tensor& q, const Tensor& k, const Tensor& v, const OptionalTensor& sinks,
                std::optional<double> scale, bool causal, int64_t window_left, int64_t window_right, double softcap) {
  constexpr Op op("prefill");
  expect_given(op, {{"q", q}, {"k", k}, {"v", v}});
  const Call call(op, q);
  Attention16Params params{};
  fill_dense(op, call, q, k, v, false, sinks, {scale, causal, window_left, window_right, softcap}, params);
  Results results = make_outputs(op, call, q, std::nullopt, params.query);
  call.run(&Backend::prefill, &Backend::attention_16_scratch_bytes, params);
  return results;
}

Results prefill_varlen(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& cu_seqlens_q,
                       const Tensor& cu_seqlens_k, const OptionalTensor& sinks, int64_t max_seqlen_q,
                       int64_t max_seqlen_k, std::optional<double> scale, bool causal, int64_t window_left,
                       int64_t window_right, double softcap) {
  constexpr Op op("prefill_varlen");
  expect_given(op, {{"q", q}, {"k", k}, {"v", v}, {"cu_seqlens_q", cu_seqlens_q}, {"cu_seqlens_k", cu_seqlens_k}});
  const Call call(op, q);
  Attention16Params params{};
  fill_dense(op, call, q, k, v, true, sinks, {scale, causal, window_left, window_right, softcap}, params);
  expect_at_least(op, "max_seqlen_q", max_seqlen_q, 0);
  expect_at_least(op, "max_seqlen_k", max_seqlen_k, 0);
  params.query.batch = view_cu_seqlens(op, "cu_seqlens_q", cu_seqlens_q, q, params.query.cu_seqlens_q);
  if (view_cu_seqlens(op, "cu_seqlens_k", cu_seqlens_k, q, params.kv.cu_seqlens_k) != params.query.batch)
    op.refuse("cu_seqlens_k", "as many elements as cu_seqlens_q, " + shape_of(cu_seqlens_q), shape_of(cu_seqlens_k));
  call.check_values(params);
  Results results = make_outputs(op, call, q, std::nullopt, params.query);
  call.run(&Backend::prefill, &Backend::attention_16_scratch_bytes, params);
  return results;
}

}  // namespace flashq
