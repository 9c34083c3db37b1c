// Attention for many rows on Hopper: see prefill_sm90.cu.
#pragma once
#include "cuda/launch.h"

namespace flashq::cuda {

// Whether the kernel can run the call: a GPU of compute capability 9.0, a build for it, and sizes, strides and options
// that TMA and the kernel can take.
[[nodiscard]] bool prefill_sm90_takes(const Attention16Params&, const Device&);
[[nodiscard]] int64_t prefill_sm90_scratch_bytes(const Attention16Params&);
[[nodiscard]] Status prefill_sm90(const Attention16Params&, const Device&, const Launch&);

}  // namespace flashq::cuda
