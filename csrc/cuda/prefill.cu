// prefill and prefill_varlen on CUDA: which kernel runs a call, and how much of it at once.
#include "cuda/kernels.h"
#include "cuda/prefill.h"
#include "cuda/prefill_sm90.h"

namespace flashq::cuda {
namespace {

// Sequences of a dense call split their keys alike, however many they are: they go to the kernels in groups whose
// partial results are not more than that.
constexpr int64_t kMostPartialBytes = 64 << 20;

// Some sequences of a dense call.
Attention16Params slice(Attention16Params p, int64_t first, int64_t count) {
  QueryView& q = p.query;
  KvView& kv = p.kv;
  const auto skipped = [&](const int64_t (&stride)[3], Dtype dtype) { return first * stride[0] * size_of(dtype); };
  q.q = static_cast<const char*>(q.q) + skipped(q.q_stride, q.dtype);
  q.out = static_cast<char*>(q.out) + skipped(q.out_stride, q.out_dtype);
  q.lse += first * q.lse_stride[0];
  kv.k = static_cast<const char*>(kv.k) + skipped(kv.k_stride, q.dtype);
  kv.v = static_cast<const char*>(kv.v) + skipped(kv.v_stride, q.dtype);
  q.batch = kv.num_pages = count;
  q.total_tokens = count * q.q_len;
  return p;
}

int64_t partial_bytes(const Attention16Params& p, bool on_sm90) {
  return on_sm90 ? prefill_sm90_scratch_bytes(p) : prefill_sm80_scratch_bytes(p);
}

// How many sequences go to the kernel at once.
int64_t group_of(const Attention16Params& p, bool on_sm90) {
  const QueryView& q = p.query;
  if (q.cu_seqlens_q.given() || p.seqlens.given() || partial_bytes(p, on_sm90) <= kMostPartialBytes) return q.batch;
  return max_of<int64_t>(kMostPartialBytes / partial_bytes(slice(p, 0, 1), on_sm90), 1);
}

}  // namespace

int64_t prefill_scratch_bytes(const Attention16Params& p, const Launch& launch) {
  Device device{};
  if (p.query.empty() || !enter(launch, device).ok()) return 0;  // prefill() says why
  const bool on_sm90 = prefill_sm90_takes(p, device);
  const int64_t group = group_of(p, on_sm90);
  return partial_bytes(group == p.query.batch ? p : slice(p, 0, group), on_sm90);
}

Status prefill(const Attention16Params& p, const Launch& launch) {
  Device device;
  if (const Status status = enter(launch, device); !status.ok()) return status;
  if (p.query.empty()) return {};
  const bool on_sm90 = prefill_sm90_takes(p, device);
  const auto run = [&](const Attention16Params& some) {
    return on_sm90 ? prefill_sm90(some, device, launch) : prefill_sm80(some, device, launch);
  };
  const int64_t batch = p.query.batch, group = group_of(p, on_sm90);
  if (group == batch) return run(p);
  for (int64_t first = 0; first < batch; first += group)
    if (const Status status = run(slice(p, first, min_of(group, batch - first))); !status.ok()) return status;
  return {};
}

}  // namespace flashq::cuda
