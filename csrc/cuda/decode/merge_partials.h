// The kernel that merges the partial results of split items (decode_merge.cu).
#pragma once
#include "backend.h"
#include "cuda/decode/partials.cuh"

namespace flashq::cuda {

// Runs behind a kernel of `ctas` CTAs that wrote the partials; `rows` is how many an item has at most. From compute
// capability 9.0 on its blocks start while that kernel ends (programmatic dependent launch).
void launch_merge_partials(const AttentionParams& p, const Partials& partials, int64_t ctas, int64_t rows,
                           const Launch& launch);

}  // namespace flashq::cuda
