// The ops, as the dispatcher calls them: CPU and CUDA alike. Schemas and defaults: schemas.cpp. Semantics:
// docs/contract.md.
#pragma once
#include <tuple>

#include "ops/checks.h"

namespace flashq {

using Results = std::tuple<Tensor, Tensor>;  // out, lse
using OptionalDtype = std::optional<ScalarType>;

Results prefill(const Tensor& q, const Tensor& k, const Tensor& v, const OptionalTensor& sinks,
                std::optional<double> scale, bool causal, int64_t window_left, int64_t window_right, double softcap);

Results prefill_varlen(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& cu_seqlens_q,
                       const Tensor& cu_seqlens_k, const OptionalTensor& sinks, int64_t max_seqlen_q,
                       int64_t max_seqlen_k, std::optional<double> scale, bool causal, int64_t window_left,
                       int64_t window_right, double softcap);

Results decode(const Tensor& q, const Tensor& k_cache, const Tensor& v_cache, const Tensor& seqlens,
               const OptionalTensor& block_table, const OptionalTensor& cu_seqlens_q, const OptionalTensor& kv_start,
               const OptionalTensor& sinks, int64_t max_seqlen_q, std::optional<double> scale, bool causal,
               int64_t window_left, double softcap, int64_t kv_chunk, OptionalDtype out_dtype);

Results tbq4_attention(const Tensor& q, const Tensor& k_codes, const Tensor& k_norms, const Tensor& v_codes,
                       const Tensor& v_norms, const Tensor& seqlens, const OptionalTensor& block_table,
                       const OptionalTensor& cu_seqlens_q, const OptionalTensor& kv_start, const OptionalTensor& sinks,
                       const OptionalTensor& k_offsets, const OptionalTensor& exact_k, const OptionalTensor& exact_v,
                       const OptionalTensor& exact_block_table, int64_t exact_first, int64_t exact_last,
                       int64_t max_seqlen_q, std::optional<double> scale, bool causal, int64_t window_left,
                       double softcap, int64_t kv_chunk, OptionalDtype out_dtype);

void kv_append_(const Tensor& k, const Tensor& v, const Tensor& k_cache, const Tensor& v_cache, const Tensor& slots);

void tbq4_append_(const Tensor& k, const Tensor& v, const Tensor& k_codes, const Tensor& k_norms, const Tensor& v_codes,
                  const Tensor& v_norms, const Tensor& slots, const OptionalTensor& k_offsets);

// Returns q, turned.
Tensor tbq4_rope_append_(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& cos, const Tensor& sin,
                         const Tensor& positions, const Tensor& k_codes, const Tensor& k_norms, const Tensor& v_codes,
                         const Tensor& v_norms, const Tensor& slots, const OptionalTensor& k_offsets,
                         const OptionalTensor& exact_k, const OptionalTensor& exact_v,
                         const OptionalTensor& exact_slots, bool interleaved);

void tbq4_page_offsets_(const Tensor& k, const Tensor& k_codes, const Tensor& k_norms, const Tensor& k_offsets,
                        const Tensor& seqlens, const Tensor& block_table, const Tensor& cu_seqlens,
                        const OptionalTensor& kv_start, const OptionalTensor& exact_k,
                        const OptionalTensor& exact_block_table);

Results tbq4_quantize(const Tensor& x);  // codes, norms
Tensor tbq4_dequantize(const Tensor& codes, const Tensor& norms, OptionalDtype dtype);
Tensor tbq4_rotate(const Tensor& x, bool inverse);

Results merge_states(const Tensor& outs, const Tensor& lses);

}  // namespace flashq
