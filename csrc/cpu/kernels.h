// What each ISA level offers to the dispatcher, and the kernels of a level to each other. The files of cpu/kernels/ are
// compiled once per level, into namespace flashq::<level>.
#pragma once
#include "cpu/plan.h"

namespace flashq {
namespace cpu {

inline constexpr int64_t kFewRows =
    24;  // of a KV head, for the kernel of few rows: 1.4 times faster there, level at 32

// One level's functions. prefill, prefill_varlen and decode are one op here: a sequence's rows decide which kernel its
// units go to.
struct Kernels {
  int64_t (*attention_16_scratch_bytes)(const Attention16Params&, int32_t workers);
  Status (*attention_16)(const Attention16Params&, const Launch&);
  int64_t (*tbq4_attention_scratch_bytes)(const AttentionTbq4Params&, int32_t workers);
  Status (*tbq4_attention)(const AttentionTbq4Params&, const Launch&);
  Status (*kv_append)(const KvAppendParams&, const Launch&);
  Status (*tbq4_append)(const Tbq4AppendParams&, const Launch&);
  Status (*tbq4_rope_append)(const Tbq4RopeAppendParams&, const Launch&);
  Status (*tbq4_page_offsets)(const PageOffsetsParams&, const Launch&);
  Status (*tbq4_quantize)(const Tbq4QuantizeParams&, const Launch&);
  Status (*tbq4_dequantize)(const Tbq4DequantizeParams&, const Launch&);
  Status (*tbq4_rotate)(const Tbq4RotateParams&, const Launch&);
  Status (*merge_states)(const MergeParams&, const Launch&);
};

}  // namespace cpu

namespace portable {
extern const cpu::Kernels kernels;
}
namespace avx2 {
extern const cpu::Kernels kernels;
}
namespace avx512 {
extern const cpu::Kernels kernels;
}

#if defined(FLASHQ_ISA)
namespace FLASHQ_ISA {

int64_t attention_16_scratch_bytes(const Attention16Params&, int32_t workers);
Status attention_16(const Attention16Params&, const Launch&);
int64_t tbq4_attention_scratch_bytes(const AttentionTbq4Params&, int32_t workers);
Status tbq4_attention(const AttentionTbq4Params&, const Launch&);
Status kv_append(const KvAppendParams&, const Launch&);
Status tbq4_append(const Tbq4AppendParams&, const Launch&);
Status tbq4_rope_append(const Tbq4RopeAppendParams&, const Launch&);
Status tbq4_page_offsets(const PageOffsetsParams&, const Launch&);
Status tbq4_quantize(const Tbq4QuantizeParams&, const Launch&);
Status tbq4_dequantize(const Tbq4DequantizeParams&, const Launch&);
Status tbq4_rotate(const Tbq4RotateParams&, const Launch&);
Status merge_states(const MergeParams&, const Launch&);

// prefill.cpp: sequences of many rows. Scratch of a worker, and one unit.
int64_t many_rows_worker_bytes(const Attention16Params&, int64_t block_rows);
void run_many_rows(const Attention16Params&, const cpu::Plan&, const cpu::Unit&, std::byte* scratch);

// decode.cpp: sequences of at most kFewRows rows a KV head. How many heads a unit takes, its scratch, and one unit.
int64_t few_rows_heads(const Attention16Params&, int32_t workers);
int64_t few_rows_worker_bytes(const Attention16Params&, int64_t heads);
void run_few_rows(const Attention16Params&, const cpu::Plan&, const cpu::Unit&, std::byte* scratch);

}  // namespace FLASHQ_ISA
#endif

}  // namespace flashq
