// The table of one ISA level.
#include "cpu/kernels.h"

namespace flashq::FLASHQ_ISA {

const cpu::Kernels kernels{
    .attention_16_scratch_bytes = attention_16_scratch_bytes,
    .attention_16 = attention_16,
    .tbq4_attention_scratch_bytes = tbq4_attention_scratch_bytes,
    .tbq4_attention = tbq4_attention,
    .kv_append = kv_append,
    .tbq4_append = tbq4_append,
    .tbq4_rope_append = tbq4_rope_append,
    .tbq4_page_offsets = tbq4_page_offsets,
    .tbq4_quantize = tbq4_quantize,
    .tbq4_dequantize = tbq4_dequantize,
    .tbq4_rotate = tbq4_rotate,
    .merge_states = merge_states,
};

}  // namespace flashq::FLASHQ_ISA
