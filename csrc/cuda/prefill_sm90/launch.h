// Launches by size, each instantiated in a file of its own so that they compile side by side.
#pragma once
#include <algorithm>
#include <bit>

#include "cuda/launch.h"

namespace flashq::cuda::sm90 {

// Query heads of one KV head that a tile takes together: a power of two, because row -> token is a shift.
inline int64_t pack_of(const QueryView& q) {
  return std::min<int64_t>(1 << std::countr_zero(uint64_t(q.q_heads / q.kv_heads)), 64);
}

// head_dim <= kTileD: 64, 128 or 256.
template <int kTileD> [[nodiscard]] Status launch_prefill(const Attention16Params&, const Device&, const Launch&);

}  // namespace flashq::cuda::sm90
