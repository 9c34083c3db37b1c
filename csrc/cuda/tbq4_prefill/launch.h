// tbq4_attention for many rows on Hopper: see tbq4_prefill.cu.
#pragma once
#include "cuda/launch.h"

namespace flashq::cuda {

// Whether a call has so many rows a KV head that expanding tiles of keys once for 128 of them pays.
[[nodiscard]] bool tbq4_prefill_wants(const AttentionTbq4Params&);
// Whether the kernel can run it: a GPU of compute capability 9.0, a build for it, pages of a multiple of 16 tokens,
// planes at multiples of 16 bytes.
[[nodiscard]] bool tbq4_prefill_takes(const AttentionTbq4Params&, const Device&);
[[nodiscard]] int64_t tbq4_prefill_scratch_bytes(const AttentionTbq4Params&);
[[nodiscard]] Status tbq4_prefill(const AttentionTbq4Params&, const Device&, const Launch&);

namespace tbq4_sm90 {

struct Params;

// One head dim, in a file of its own so that they compile side by side. launch_status() reports a failure.
template <int kDim> void launch_prefill(const Params&, unsigned blocks, const Device&, const Launch&);

}  // namespace tbq4_sm90
}  // namespace flashq::cuda
