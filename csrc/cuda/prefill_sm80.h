// Between the host's side of the mma.sync kernel and its instances.
#pragma once
#include "cuda/kv_splits.cuh"
#include "cuda/launch.h"
#include "cuda/softmax_step.cuh"

namespace flashq::cuda {

struct PrefillArguments {
  Attention16Params p;
  ScoreRule rule;
  int64_t row_tiles;  // of a KV head; of all sequences
  int64_t section;    // (sequence, KV head) pairs whose K and V share the L2 cache
  KvSplits splits;
  int ring;                  // tiles of K and V in shared memory
  bool narrow_q, narrow_kv;  // no 16-byte loads
};

// Row tiles and splits of a call, the same for its scratch and its launch.
struct PrefillPlan {
  int64_t row_tiles;
  KvSplits splits;
};
template <int kDim> [[nodiscard]] PrefillPlan plan_prefill_sm80(const Attention16Params&);

// For head dims up to kDim, the instance of prefill_sm80_d<kDim>.cu.
template <int kDim> [[nodiscard]] Status launch_prefill_sm80(const PrefillArguments&, const Device&, const Launch&);

}  // namespace flashq::cuda
