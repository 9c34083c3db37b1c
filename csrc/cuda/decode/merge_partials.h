// The kernel that merges the partial results of split items (decode_merge.cu).
#pragma once
#include "backend.h"
#include "cuda/decode/partials.cuh"
#include "cuda/decode/plan_table.cuh"

namespace flashq::cuda {

// Whether a device runs the code for compute capability 9.0, which clusters and dependent launches need: PTX of 8.0 on
// a newer GPU does not.
[[nodiscard]] bool runs_code_of_90(int32_t device);

// Runs behind a kernel that wrote partials by the plan of `split` and `alike`. From compute capability 9.0 on its
// blocks start while that kernel ends (programmatic dependent launch).
void launch_merge_partials(const AttentionParams& p, const SplitConfig& split, const AlikeRule& alike,
                           const Partials& partials, const Launch& launch);

}  // namespace flashq::cuda
