// FLASHQ_CHECK=1 on the GPU: ahead of an op a small kernel looks at its index tensors, and the next call raises what it
// found. The ops' own kernels carry nothing for it.
#pragma once
#include "backend.h"

namespace flashq::cuda {

// Waits for the stream, and returns what kernels found since the last time; nothing while the stream captures. A call
// has entered its device.
[[nodiscard]] Status raise_finding(const Launch&);

// Starts the check of the values that index_checks.h names.
[[nodiscard]] Status check_indices(const Attention16Params&, const Launch&);
[[nodiscard]] Status check_indices(const AttentionTbq4Params&, const Launch&);
[[nodiscard]] Status check_indices(const KvAppendParams&, const Launch&);
[[nodiscard]] Status check_indices(const Tbq4AppendParams&, const Launch&);
[[nodiscard]] Status check_indices(const Tbq4RopeAppendParams&, const Launch&);
[[nodiscard]] Status check_indices(const PageOffsetsParams&, const Launch&);

}  // namespace flashq::cuda
