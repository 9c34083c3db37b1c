// The entry points of the CUDA backend, for the table in backend.cu.
#pragma once
#include "backend.h"

namespace flashq::cuda {

[[nodiscard]] int64_t attention_16_scratch_bytes(const Attention16Params&, const Launch&);
[[nodiscard]] Status prefill(const Attention16Params&, const Launch&);
[[nodiscard]] int64_t attention_tbq4_scratch_bytes(const AttentionTbq4Params&, const Launch&);
[[nodiscard]] Status tbq4_attention(const AttentionTbq4Params&, const Launch&);
[[nodiscard]] Status decode(const Attention16Params&, const Launch&);
[[nodiscard]] Status kv_append(const KvAppendParams&, const Launch&);
[[nodiscard]] Status tbq4_append(const Tbq4AppendParams&, const Launch&);
[[nodiscard]] Status tbq4_rope_append(const Tbq4RopeAppendParams&, const Launch&);
[[nodiscard]] Status tbq4_page_offsets(const PageOffsetsParams&, const Launch&);
[[nodiscard]] Status tbq4_quantize(const Tbq4QuantizeParams&, const Launch&);
[[nodiscard]] Status tbq4_dequantize(const Tbq4DequantizeParams&, const Launch&);
[[nodiscard]] Status tbq4_rotate(const Tbq4RotateParams&, const Launch&);
[[nodiscard]] Status merge_states(const MergeParams&, const Launch&);

}  // namespace flashq::cuda
