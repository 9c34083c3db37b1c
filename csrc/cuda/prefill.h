// The implementations of attention for many rows, of which prefill.cu chooses one for each call.
#pragma once
#include "backend.h"
#include "cuda/launch.h"

namespace flashq::cuda {

[[nodiscard]] int64_t prefill_scratch_bytes(const Attention16Params&, const Launch&);

// prefill_sm80.cu, mma.sync: every GPU, every stride, dense and paged keys.
[[nodiscard]] int64_t prefill_sm80_scratch_bytes(const Attention16Params&);
[[nodiscard]] Status prefill_sm80(const Attention16Params&, const Device&, const Launch&);

}  // namespace flashq::cuda
