// prefill and prefill_varlen on CUDA: which kernel runs a call.
#include "cuda/kernels.h"
#include "cuda/prefill.h"
#include "cuda/prefill_sm90.h"

namespace flashq::cuda {

int64_t prefill_scratch_bytes(const Attention16Params& p) {
  return max_of(prefill_sm80_scratch_bytes(p), prefill_sm90_scratch_bytes(p));
}

Status prefill(const Attention16Params& p, const Launch& launch) {
  Device device;
  if (const Status status = enter(launch, device); !status.ok()) return status;
  if (p.query.total_tokens == 0 || p.query.q_heads == 0) return {};
  if (prefill_sm90_takes(p, device)) return prefill_sm90(p, device, launch);
  return prefill_sm80(p, device, launch);
}

}  // namespace flashq::cuda
