// Every op's schema, and its registration for CPU and CUDA. The schemas are frozen: docs/contract.md.
#include <torch/csrc/stable/library.h>

#include "ops/ops.h"

// Optional tensors stand before the `*`: keyword-only tensors would rule out autograd registration.
#define FLASHQ_MASK \
  "float? scale=None, bool causal=False, SymInt window_left=-1, SymInt window_right=-1, float softcap=0.0"
#define FLASHQ_CACHE                                                                                       \
  "SymInt max_seqlen_q=0, float? scale=None, bool causal=True, SymInt window_left=-1, float softcap=0.0, " \
  "SymInt kv_chunk=0, ScalarType? out_dtype=None"

STABLE_TORCH_LIBRARY(flashq, m) {
  m.def("prefill(Tensor q, Tensor k, Tensor v, Tensor? sinks=None, *, " FLASHQ_MASK ") -> (Tensor, Tensor)");
  m.def(
      "prefill_varlen(Tensor q, Tensor k, Tensor v, Tensor cu_seqlens_q, Tensor cu_seqlens_k, Tensor? sinks=None, *, "
      "SymInt max_seqlen_q=0, SymInt max_seqlen_k=0, " FLASHQ_MASK ") -> (Tensor, Tensor)");
  m.def(
      "decode(Tensor q, Tensor k_cache, Tensor v_cache, Tensor seqlens, Tensor? block_table=None, "
      "Tensor? cu_seqlens_q=None, Tensor? kv_start=None, Tensor? sinks=None, *, " FLASHQ_CACHE ") -> (Tensor, Tensor)");
  m.def("kv_append_(Tensor k, Tensor v, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor slots) -> ()");
  m.def("tbq4_quantize(Tensor x) -> (Tensor, Tensor)");
  m.def("tbq4_dequantize(Tensor codes, Tensor norms, *, ScalarType? dtype=None) -> Tensor");
  m.def("tbq4_rotate(Tensor x, *, bool inverse=False) -> Tensor");
  m.def(
      "tbq4_append_(Tensor k, Tensor v, Tensor(a!) k_codes, Tensor(b!) k_norms, Tensor(c!) v_codes, "
      "Tensor(d!) v_norms, Tensor slots, Tensor? k_offsets=None) -> ()");
  m.def(
      "tbq4_rope_append_(Tensor q, Tensor k, Tensor v, Tensor cos, Tensor sin, Tensor positions, Tensor(a!) k_codes, "
      "Tensor(b!) k_norms, Tensor(c!) v_codes, Tensor(d!) v_norms, Tensor slots, Tensor? k_offsets=None, "
      "Tensor(e!)? exact_k=None, Tensor(f!)? exact_v=None, Tensor? exact_slots=None, *, bool interleaved=False) "
      "-> Tensor");
  m.def(
      "tbq4_page_offsets_(Tensor k, Tensor k_codes, Tensor k_norms, Tensor(a!) k_offsets, Tensor seqlens, "
      "Tensor block_table, Tensor cu_seqlens, Tensor? kv_start=None, Tensor? exact_k=None, "
      "Tensor? exact_block_table=None) -> ()");
  m.def(
      "tbq4_attention(Tensor q, Tensor k_codes, Tensor k_norms, Tensor v_codes, Tensor v_norms, Tensor seqlens, "
      "Tensor? block_table=None, Tensor? cu_seqlens_q=None, Tensor? kv_start=None, Tensor? sinks=None, "
      "Tensor? k_offsets=None, Tensor? exact_k=None, Tensor? exact_v=None, Tensor? exact_block_table=None, *, "
      "SymInt exact_first=0, SymInt exact_last=0, " FLASHQ_CACHE ") -> (Tensor, Tensor)");
  m.def("merge_states(Tensor outs, Tensor lses) -> (Tensor, Tensor)");
}

namespace {

// One function an op: it finds the backend of its tensors' device itself.
void implement(torch::stable::detail::StableLibrary& m) {
  m.impl("prefill", TORCH_BOX(&flashq::prefill));
  m.impl("prefill_varlen", TORCH_BOX(&flashq::prefill_varlen));
  m.impl("decode", TORCH_BOX(&flashq::decode));
  m.impl("kv_append_", TORCH_BOX(&flashq::kv_append_));
  m.impl("tbq4_quantize", TORCH_BOX(&flashq::tbq4_quantize));
  m.impl("tbq4_dequantize", TORCH_BOX(&flashq::tbq4_dequantize));
  m.impl("tbq4_rotate", TORCH_BOX(&flashq::tbq4_rotate));
  m.impl("tbq4_append_", TORCH_BOX(&flashq::tbq4_append_));
  m.impl("tbq4_rope_append_", TORCH_BOX(&flashq::tbq4_rope_append_));
  m.impl("tbq4_page_offsets_", TORCH_BOX(&flashq::tbq4_page_offsets_));
  m.impl("tbq4_attention", TORCH_BOX(&flashq::tbq4_attention));
  m.impl("merge_states", TORCH_BOX(&flashq::merge_states));
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(flashq, CPU, m) { implement(m); }
STABLE_TORCH_LIBRARY_IMPL(flashq, CUDA, m) { implement(m); }
