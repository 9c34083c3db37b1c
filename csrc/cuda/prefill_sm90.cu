// Attention for many rows on Hopper: TMA, wgmma, warp-specialised, persistent.
//
// One CTA a multiprocessor draws tiles of query rows of a sequence and a pack of heads. One warp streams the keys and
// values that the rows see by TMA, another one Q; two or three warpgroups of consumers own 64 rows each and keep S, P
// and O in registers:
//   S (64 x kTileK) = Q K^T, both in shared memory;  P = softmax(S);  O (64 x kTileD) += P V, P in registers.
// S of the next tile and O of the last one are issued together, and the softmax runs meanwhile.
#include <cmath>
#include <string_view>

#include "cuda/prefill_sm90.h"
#include "cuda/prefill_sm90/launch.h"
#include "cuda/prefill_sm90/traits.cuh"

namespace flashq::cuda {
namespace {

// wgmma is an instruction of sm_90a alone.
constexpr bool kBuilt = std::string_view(FLASHQ_CUDA_ARCHS).find("9.0a") != std::string_view::npos;

constexpr int64_t kMostRows = int64_t{1} << 29;  // positions, rows and tiles fit an int, window and all

// Whether TMA can read rows at these strides (batch, token, head), `pack` heads at once; a stride nobody takes may be
// anything.
bool tma_fits(const void* data, const int64_t (&stride)[3], int64_t batch, int64_t tokens, int64_t heads,
              int64_t pack) {
  constexpr int64_t kMost = (int64_t{1} << 39) - 8;  // elements; the last multiple of 16 below 2^40 bytes
  if (reinterpret_cast<uintptr_t>(data) % 16 != 0) return false;
  const int64_t size[3] = {batch, tokens, heads};
  for (int i = 0; i < 3; ++i) {
    const int64_t most = i == 2 ? kMost / pack : kMost;
    if (size[i] > 1 && (stride[i] < (i > 0) || stride[i] % 8 != 0 || stride[i] > most)) return false;
  }
  return true;
}

}  // namespace

bool prefill_sm90_takes(const Attention16Params& p, const Device& device) {
  if (!kBuilt || device.arch != 90 || device.shared_bytes < sm90::kMostShared) return false;
  const QueryView& q = p.query;
  const bool packed = q.cu_seqlens_q.given();
  // Scores times log2(e), and what is multiplied before, stay float32.
  const float last = p.score.softcap > 0 ? p.score.softcap : p.score.scale;
  const float first = p.score.softcap > 0 ? p.score.scale / p.score.softcap : p.score.scale;
  if (!std::isfinite(last * kLog2E) || !(std::isnormal(first) || first == 0)) return false;
  if (q.dtype == Dtype::kFloat32 || q.out_dtype != q.dtype) return false;
  if (p.kv.block_table.given() || p.seqlens.given() || p.kv_start.given()) return false;
  const int64_t tokens = packed ? q.total_tokens : q.q_len, batch = packed ? 1 : q.batch, keys = p.kv.page_size;
  if (tokens == 0 || batch == 0 || keys == 0) return false;
  const int64_t rows = tokens * q.q_heads;
  if (keys >= kMostRows || batch >= kMostRows || rows >= kMostRows ||
      rows * batch / 64 + q.batch * q.q_heads >= kMostRows)
    return false;
  const int64_t pack = sm90::pack_of(q);
  return tma_fits(q.q, q.q_stride, batch, tokens, q.q_heads, pack) &&
         tma_fits(q.out, q.out_stride, batch, tokens, q.q_heads, pack) &&
         tma_fits(p.kv.k, p.kv.k_stride, batch, keys, q.kv_heads, 1) &&
         tma_fits(p.kv.v, p.kv.v_stride, batch, keys, q.kv_heads, 1);
}

int64_t prefill_sm90_scratch_bytes(const Attention16Params& p) {
  return static_cast<int64_t>(sizeof(sm90::Plan)) +
         (p.query.cu_seqlens_q.given() ? p.query.batch * static_cast<int64_t>(sizeof(sm90::PlannedSequence)) : 0);
}

Status prefill_sm90(const Attention16Params& p, const Device& device, const Launch& launch) {
  if (p.query.head_dim <= 64) return sm90::launch_prefill<64>(p, device, launch);
  if (p.query.head_dim <= 128) return sm90::launch_prefill<128>(p, device, launch);
  return sm90::launch_prefill<256>(p, device, launch);
}

}  // namespace flashq::cuda
