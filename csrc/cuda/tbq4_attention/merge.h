// The kernel that merges partial results over codes (tbq4_merge.cu).
#pragma once
#include "cuda/overlapping_launch.h"
#include "cuda/tbq4_attention/call.h"

namespace flashq::cuda {

// Runs behind a kernel that wrote partials by p's plan. From compute capability 9.0 on its blocks start while that
// kernel ends (programmatic dependent launch).
void launch_merge_codes(const CodeParams& p, const Device& device, const Launch& launch);

}  // namespace flashq::cuda
