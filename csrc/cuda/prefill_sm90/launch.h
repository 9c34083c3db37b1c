// Launches by size, each instantiated in a file of its own so that they compile side by side.
#pragma once
#include "cuda/launch.h"

namespace flashq::cuda::sm90 {

// head_dim <= kTileD: 64, 128 or 256.
template <int kTileD> [[nodiscard]] Status launch_prefill(const Attention16Params&, const Device&, const Launch&);

}  // namespace flashq::cuda::sm90
