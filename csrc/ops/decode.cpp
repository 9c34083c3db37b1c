#include "ops/attention_args.h"

namespace flashq {
Results decode(const Tensor& q, const Tensor& k_cache, const Tensor& v_cache, const Tensor& seqlens,
               const OptionalTensor& block_table, const OptionalTensor& cu_seqlens_q, const OptionalTensor& kv_start,
               const OptionalTensor& sinks, int64_t max_seqlen_q, std::optional<double> scale, bool causal,
               int64_t window_left, double softcap, int64_t kv_chunk, OptionalDtype out_dtype) {
  constexpr Op op("decode");
  expect_given(op, {{"q", q}, {"k_cache", k_cache}, {"v_cache", v_cache}, {"seqlens", seqlens}});
  const Call call(op, q);
  expect_shape(op, "k_cache", k_cache, {{"P"}, {"N"}, {"Hkv"}, {"D"}});
  const int64_t pages = k_cache.size(0), page_size = k_cache.size(1), kv_heads = k_cache.size(2);
  Attention16Params params{};
  fill_cache_params(op, call,
                    {.q = q,
                     .seqlens = seqlens,
                     .block_table = block_table,
                     .cu_seqlens_q = cu_seqlens_q,
                     .kv_start = kv_start,
                     .sinks = sinks,
                     .max_seqlen_q = max_seqlen_q,
                     .kv_chunk = kv_chunk,
                     .score = {scale, causal, window_left, kUnlimited, softcap},
                     .out_dtype = out_dtype},
                    kv_heads, "k_cache", params);
  for (const auto& [name, t] : {std::pair{"k_cache", &k_cache}, std::pair{"v_cache", &v_cache}}) {
    expect_like_query(op, name, *t, q);
    expect_shape(op, name, *t, {{"P", pages}, {"N", page_size}, {"Hkv", kv_heads}, {"D", params.query.head_dim}});
  }
  KvView& kv = params.kv;
  kv = {.k = k_cache.const_data_ptr(),
        .v = v_cache.const_data_ptr(),
        .k_stride = {k_cache.stride(0), k_cache.stride(1), k_cache.stride(2)},
        .v_stride = {v_cache.stride(0), v_cache.stride(1), v_cache.stride(2)},
        .num_pages = pages,
        .page_size = page_size,
        .block_table = {},
        .max_pages = 0,
        .cu_seqlens_k = {}};
  view_block_table(op, block_table, q, params.query.batch, "k_cache", pages, kv.block_table, kv.max_pages);
  call.check_values(params);
  Results results = make_outputs(op, call, q, out_dtype, params.query);
  call.run(&Backend::decode, &Backend::attention_16_scratch_bytes, params);
  return results;
}

}  // namespace flashq
