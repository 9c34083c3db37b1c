// Attention for many rows on Hopper: TMA, wgmma, warp-specialised, persistent.
//
// One CTA a multiprocessor draws tiles of query rows of a sequence and a pack of heads. A warp finds the next tile,
// others stream Q, and the keys and the values that the rows see, by TMA; two or three warpgroups of consumers own 64
// rows each and keep S, P and O in registers:
//   S (64 x kTileK) = Q K^T, both in shared memory;  P = softmax(S);  O (64 x kTileD) += P V, P in registers.
// S of the next tile and O of the last one are issued together, and the softmax runs meanwhile.
#include <cmath>

#include "cuda/overlapping_launch.h"
#include "cuda/prefill_sm90.h"
#include "cuda/prefill_sm90/launch.h"
#include "cuda/prefill_sm90/merge_splits.cuh"
#include "cuda/prefill_sm90/plan.cuh"
#include "cuda/sequences.cuh"

namespace flashq::cuda {
namespace {

// Whether TMA can read rows at these strides (batch, token, head), `pack` heads at once; a stride nobody takes may be
// anything. `shared`: all sequences may be one.
bool tma_fits(const void* data, const int64_t (&stride)[3], int64_t batch, int64_t tokens, int64_t heads, int64_t pack,
              bool shared) {
  constexpr int64_t kMost = (int64_t{1} << 39) - 8;  // elements; the last multiple of 16 below 2^40 bytes
  if (reinterpret_cast<uintptr_t>(data) % 16 != 0) return false;
  const int64_t size[3] = {batch, tokens, heads};
  for (int i = 0; i < 3; ++i) {
    const int64_t least = i == 0 && shared ? 0 : 1, most = i == 2 ? kMost / pack : kMost;
    if (size[i] > 1 && (stride[i] < least || stride[i] % 8 != 0 || stride[i] > most)) return false;
  }
  return true;
}

}  // namespace

bool prefill_sm90_takes(const Attention16Params& p, const Device& device) {
  using namespace sm90;
  if (!runs_90a(device) || device.shared_bytes < kMostShared) return false;
  const QueryView& q = p.query;
  if (q.dtype == Dtype::kFloat32 || q.out_dtype != q.dtype || p.kv_chunk != 0) return false;
  // Scores times log2(e), and what is multiplied before, stay float32.
  const float last = p.score.softcap > 0 ? p.score.softcap : p.score.scale;
  const float first = p.score.softcap > 0 ? p.score.scale / p.score.softcap : p.score.scale;
  if (!std::isfinite(last * kLog2E) || !(std::isnormal(first) || first == 0)) return false;

  const bool packed = q.cu_seqlens_q.given(), pages = p.kv.block_table.given();
  const int64_t tokens = packed ? q.total_tokens : q.q_len, batch = packed ? 1 : q.batch;
  const int64_t keys = p.kv.page_size, key_batch = is_cache(p) ? p.kv.num_pages : batch;
  if (tokens == 0 || batch == 0 || keys == 0 || key_batch == 0) return false;
  if (pages && keys % 16 != 0) return false;  // a box is on one page, and swizzled by 8 rows
  const int64_t rows = (tokens + q.batch) * q.q_heads;
  if (kv_capacity(p.kv) >= kMostRows || key_batch >= kMostRows || rows >= kMostRows || q.batch >= kMostRows ||
      rows * batch >= 64 * kMostRows)
    return false;
  const int64_t pack = pack_of(q);
  return tma_fits(q.q, q.q_stride, batch, tokens, q.q_heads, pack, true) &&
         tma_fits(q.out, q.out_stride, batch, tokens, q.q_heads, pack, false) &&
         tma_fits(p.kv.k, p.kv.k_stride, key_batch, keys, q.kv_heads, 1, !pages) &&
         tma_fits(p.kv.v, p.kv.v_stride, key_batch, keys, q.kv_heads, 1, !pages);
}

int64_t prefill_sm90_scratch_bytes(const Attention16Params& p) {
  return sm90::ScratchPlan(p, sm90::count_splits(p)).end;
}

namespace sm90 {

void launch_plan(const Attention16Params& p, const Schedule& s, int tile_q, const Launch& launch) {
  plan_prefill<<<1, kPlanThreads, 0, static_cast<cudaStream_t>(launch.stream)>>>(p, s.pack_log2, s.head_packs, tile_q);
}

void launch_merge(const QueryView& q, const float* outs, const float* lses, int splits, const Device& device,
                  const Launch& launch) {
  const dim3 blocks(static_cast<unsigned>(ceil_div(q.total_tokens * q.q_heads, kMergeWarps)));
  launch_overlapping(merge_splits, blocks, 32 * kMergeWarps, 0, device, launch, q, outs, lses, splits);
}

}  // namespace sm90

Status prefill_sm90(const Attention16Params& p, const Device& device, const Launch& launch) {
  if (p.query.head_dim <= 64) return sm90::launch_prefill<64>(p, device, launch);
  if (p.query.head_dim <= 128) return sm90::launch_prefill<128>(p, device, launch);
  return sm90::launch_prefill<256>(p, device, launch);
}

}  // namespace flashq::cuda
