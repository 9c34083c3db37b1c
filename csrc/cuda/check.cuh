// What kernels do with a value out of range under FLASHQ_CHECK=1: report it, for the next call to raise.
#pragma once
#include "cuda/launch.h"

namespace flashq::cuda {

// The first report since the last one that was raised wins. `finding` null: not in check mode.
__device__ inline void report(Finding* finding, Finding::Value what, int64_t index, int64_t got, int64_t limit) {
  if (!finding || atomicCAS_system(&finding->state, Finding::kNone, Finding::kBeingWritten) != Finding::kNone) return;
  finding->what = what;
  finding->index = index;
  finding->got = got;
  finding->limit = limit;
  __threadfence_system();
  atomicExch_system(&finding->state, Finding::kComplete);
}

}  // namespace flashq::cuda
