// The entry points of the CUDA backend, for the table in backend.cu.
#pragma once
#include "backend.h"

namespace flashq::cuda {

[[nodiscard]] Status kv_append(const KvAppendParams&, const Launch&);
[[nodiscard]] Status merge_states(const MergeParams&, const Launch&);

}  // namespace flashq::cuda
