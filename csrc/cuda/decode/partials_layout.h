// Where the partial results of split-KV attention lie in a call's scratch: at most two slots for each worker of the
// plan, or with kv_chunk one for each chunk of each item.
#pragma once
#include <algorithm>

#include "cuda/decode/partials.cuh"
#include "cuda/decode/plan.cuh"

namespace flashq::cuda {

// Blocks that run at a time, one for each multiprocessor: GPUs have at most so many.
inline constexpr int64_t kMaxCtas = 192;

// Whether items can have several partial results.
inline bool splits(const SplitConfig& c) { return !c.unit_is_split || c.capacity > static_cast<int64_t>(c.unit.value); }

struct PartialsLayout {
  int64_t o, end;  // bytes from the scratch's start, where the states are

  PartialsLayout(const AttentionParams& p, const SplitConfig& c) {
    constexpr double kMost = 0x1p50;  // no allocator has it, and the sums below do not overflow
    const double bound = c.unit_is_split ? static_cast<double>(count_row_tiles(p.query, c.block_rows.value)) *
                                               static_cast<double>(p.query.kv_heads) *
                                               static_cast<double>(ceil_div(c.capacity, c.unit.value))
                                         : 2.0 * c.workers;
    const auto slots = static_cast<int64_t>(std::min(bound, kMost));
    o = round_up(slots * c.block_rows.value * static_cast<int64_t>(sizeof(SoftmaxState<Binary>)), 64);
    end = bound > kMost ? int64_t{1} << 60 : o + slots * c.block_rows.value * p.query.head_dim * 4;
  }
};

// Nothing where nothing is split.
inline Partials place_partials(const AttentionParams& p, const SplitConfig& c) {
  if (!splits(c)) return {};
  auto* base = static_cast<char*>(p.scratch);
  return {.states = reinterpret_cast<SoftmaxState<Binary>*>(base),
          .o = reinterpret_cast<float*>(base + PartialsLayout(p, c).o),
          .block_rows = static_cast<int32_t>(c.block_rows.value),
          .head_dim = static_cast<int32_t>(p.query.head_dim)};
}

}  // namespace flashq::cuda
