// The host's side of the kernel in prefill_sm80.cuh.
#include "cuda/prefill.h"
#include "cuda/prefill_sm80.cuh"

namespace flashq::cuda {
namespace {

// Whether every row of q, k and v starts at a multiple of 16 bytes.
bool aligned(const void* data, const int64_t (&stride)[3]) {
  uintptr_t all = reinterpret_cast<uintptr_t>(data);
  for (const int64_t x : stride) all |= static_cast<uintptr_t>(x * 2);
  return widest_vector(all) == kVectorBytes;
}

}  // namespace

int64_t prefill_sm80_scratch_bytes(const Attention16Params&) { return 0; }

Status prefill_sm80(const Attention16Params& p, const Device& device, const Launch& launch) {
  const QueryView& q = p.query;
  PrefillArguments args{.p = p,
                        .rule = ScoreRule(p.score),
                        .row_tiles = 0,
                        .section = 1,
                        .ring = 0,
                        .narrow_q = !aligned(q.q, q.q_stride),
                        .narrow_kv = !aligned(p.kv.k, p.kv.k_stride) || !aligned(p.kv.v, p.kv.v_stride)};
  constexpr int64_t kSectionBytes = 32 << 20;  // of K and V in the L2 cache
  const int64_t keys = max_of<int64_t>(min_of(kv_capacity(p.kv), kSectionBytes), 1);
  args.section = max_of<int64_t>(kSectionBytes / (keys * q.head_dim * 4), 1);
  const auto stream = static_cast<cudaStream_t>(launch.stream);
  if (q.head_dim <= 64) return launch_prefill_sm80<64>(args, device, stream);
  if (q.head_dim <= 128) return launch_prefill_sm80<128>(args, device, stream);
  return launch_prefill_sm80<256>(args, device, stream);
}

}  // namespace flashq::cuda
