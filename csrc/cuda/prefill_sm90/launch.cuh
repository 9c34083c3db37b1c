// One instantiation of the kernel: the kernel function, its parameters, its launch.
#pragma once
#include <cuda_runtime_api.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdio>

#include "cuda/opt_in.h"
#include "cuda/prefill_sm90.h"
#include "cuda/prefill_sm90/consumer.cuh"
#include "cuda/prefill_sm90/launch.h"
#include "cuda/prefill_sm90/plan.cuh"
#include "cuda/prefill_sm90/producer.cuh"
#include "cuda/ptx/tensor_map.h"

namespace flashq::cuda::sm90 {
namespace {

template <class C> __global__ void __launch_bounds__(C::kThreads, 1) prefill_kernel(const __grid_constant__ Params p) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ __align__(1024) uint8_t dynamic[];
  auto& shared = *reinterpret_cast<typename C::SharedMemory*>(dynamic);
  const int warp = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / 32, 0);
  if (threadIdx.x == 0) {
    for (const CUtensorMap* map : {&p.q, &p.k, &p.v}) ptx::prefetch_tensor_map(*map);
    shared.init_barriers();
    ptx::publish_barriers();
  }
  __syncthreads();
  if (warp < 4) {
    ptx::give_registers<C::kProducerRegisters>();
    if (threadIdx.x == 0) produce_keys<C>(p, shared);
    if (threadIdx.x == 32) produce_queries<C>(p, shared);
  } else {
    ptx::take_registers<C::kConsumerRegisters>();
    consume<C>(p, shared);
  }
#else
  __trap();  // never launched
#endif
}

constexpr double kFewProducts = 1e10;  // some 60 us
constexpr int kL2Section = 32 << 20;   // bytes; more of an H200's 60 MiB of L2 leave no room for Q and O

bool encode(const void* data, const int64_t (&stride)[3], int64_t batch, int64_t tokens, int64_t heads, int64_t pack,
            uint32_t rows, const QueryView& q, CUtensorMap& map) {
  if (stride[0] == 0) batch = 1;  // what the kernel steps by
  const auto used = [](int64_t step, int64_t size) { return size > 1 ? step : 8; };
  const int64_t head = used(stride[2], heads);
  const TensorShape shape{.data = data,
                          .bfloat16 = q.dtype == Dtype::kBfloat16,
                          .size = {uint64_t(q.head_dim), uint64_t(pack), uint64_t(tokens), uint64_t(heads / pack),
                                   uint64_t(batch)},
                          .stride = {head, used(stride[1], tokens), head * pack, used(stride[0], batch)},
                          .box = {64, uint32_t(pack), rows / uint32_t(pack), 1, 1}};
  return encode_tensor_map(shape, map);
}

Cap make_cap(float multiplier) {
  constexpr double kLargest = 0.5, kFactor[3] = {0.99997744, -0.33169151, 0.11520976};  // least relative error up to it
  const double m = multiplier;
  Cap cap{.multiplier = multiplier, .limit = static_cast<float>(kLargest / std::abs(m)), .factor = {}};
  if (!(std::abs(m) > 1e-6 && std::abs(m) < 1e6)) cap.limit = -1;  // its powers leave float32
  for (int i = 0; i < 3; ++i) cap.factor[i] = static_cast<float>(kFactor[i] * std::pow(m, 2 * i + 1));
  return cap;
}

template <class C> Status run(const Attention16Params& a, const Device& device, const Launch& where) {
  const QueryView& q = a.query;
  const bool packed = q.cu_seqlens_q.given();
  const auto stream = static_cast<cudaStream_t>(where.stream);
  const int64_t pack = pack_of(q), batch = packed ? 1 : q.batch, tokens = packed ? q.total_tokens : q.q_len;
  Params p{};
  p.q_batch_step = q.q_stride[0] != 0;
  p.k_batch_step = a.kv.k_stride[0] != 0;
  p.v_batch_step = a.kv.v_stride[0] != 0;
  if (!(encode(q.q, q.q_stride, batch, tokens, q.q_heads, pack, C::kRows, q, p.q) &&
        encode(q.out, q.out_stride, batch, tokens, q.q_heads, pack, C::kRows, q, p.out) &&
        encode(a.kv.k, a.kv.k_stride, batch, a.kv.page_size, q.kv_heads, 1, C::kTileK, q, p.k) &&
        encode(a.kv.v, a.kv.v_stride, batch, a.kv.page_size, q.kv_heads, 1, C::kTileK, q, p.v))) {
    Status status;
    std::snprintf(status.message, sizeof status.message,
                  "device: expected a driver that encodes tensor maps (CUDA 12 or newer), got a refusal");
    return status;
  }
  p.out_rows = static_cast<uint16_t*>(q.out);
  std::copy_n(q.out_stride + 1, 2, p.out_stride);
  p.v_rows = static_cast<const uint16_t*>(a.kv.v);
  std::copy_n(a.kv.v_stride, 3, p.v_stride);
  p.head_dim = static_cast<int>(q.head_dim);
  p.lse = q.lse;
  std::copy_n(q.lse_stride, 3, p.lse_stride);
  p.sinks = a.score.sinks;
  p.sinks_stride = a.score.sinks_stride;
  p.packed_keys = packed;
  p.capped = a.score.softcap > 0;
  p.cap = make_cap(p.capped ? a.score.scale / a.score.softcap : a.score.scale);
  p.scale_log2 = (p.capped ? a.score.softcap : C::kTransform ? 1 : a.score.scale) * kLog2E;

  Schedule& s = p.schedule;
  const auto limit = [](int64_t window) {
    return static_cast<int>(window < 0 ? kWide : std::min<int64_t>(window, kWide));
  };
  s.window_left = limit(a.score.window_left);
  s.window_right = a.score.causal ? 0 : limit(a.score.window_right);
  s.descending = s.window_right != kWide && s.window_left == kWide;
  s.l2_keys = kL2Section / (C::kTileD * 4);
  s.batch = static_cast<int>(batch);
  s.q_len = static_cast<int>(tokens);
  s.kv_len = static_cast<int>(a.kv.page_size);
  s.pack_log2 = std::countr_zero(static_cast<uint64_t>(pack));
  s.head_packs = static_cast<int>(q.q_heads / pack);
  s.packs_per_kv = static_cast<int>(q.q_heads / q.kv_heads / pack);
  const int64_t most_tiles = (ceil_div(tokens * pack, C::kTileQ) + (packed ? q.batch : 0)) * s.head_packs * batch;
  s.tiles = static_cast<int>(most_tiles);
  const int grid = static_cast<int>(std::min<int64_t>(device.sm_count, most_tiles));
  const auto plan = static_cast<Plan*>(a.scratch);
  if (packed) {
    plan_prefill<<<1, kPlanThreads, 0, stream>>>(plan, q.cu_seqlens_q, a.kv.cu_seqlens_k, static_cast<int>(q.batch),
                                                 static_cast<int>(tokens), s.kv_len, s.pack_log2, s.head_packs,
                                                 C::kTileQ);
    s.plan = plan;
  }
  // Drawing takes a memset ahead of the kernel (3 % of a call on 1024 tokens); where that is much, tiles go round
  // instead.
  const double products = static_cast<double>(most_tiles) * C::kTileQ * s.kv_len * C::kTileD;
  if (packed || products > kFewProducts) {
    s.drawn = &plan->drawn;
    if (!packed) cudaMemsetAsync(s.drawn, 0, sizeof *s.drawn, stream);
  }
  constexpr int kSharedBytes = sizeof(typename C::SharedMemory);
  opt_in<prefill_kernel<C>>(where.device, kSharedBytes);
  prefill_kernel<C><<<grid, C::kThreads, kSharedBytes, stream>>>(p);
  return launch_status();
}

template <class Element, int kTileD> Status run(const Attention16Params& p, const Device& device, const Launch& where) {
  if (p.score.softcap > 0 || !(p.score.scale > 0)) return run<Traits<Element, kTileD, true>>(p, device, where);
  return run<Traits<Element, kTileD, false>>(p, device, where);
}

}  // namespace

template <int kTileD> Status launch_prefill(const Attention16Params& p, const Device& device, const Launch& where) {
  if (p.query.dtype == Dtype::kBfloat16) return run<Bfloat16, kTileD>(p, device, where);
  return run<Float16, kTileD>(p, device, where);
}

}  // namespace flashq::cuda::sm90
