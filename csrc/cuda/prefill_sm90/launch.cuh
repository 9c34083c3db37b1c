// One instantiation of the kernel: the kernel function, its parameters, its launch.
#pragma once
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cmath>
#include <numeric>

#include "cuda/opt_in.h"
#include "cuda/overlapping_launch.h"
#include "cuda/prefill_sm90.h"
#include "cuda/prefill_sm90/consumer.cuh"
#include "cuda/prefill_sm90/launch.h"
#include "cuda/prefill_sm90/producer.cuh"
#include "cuda/ptx/dependent_launch.cuh"
#include "cuda/ptx/tensor_map.h"
#include "cuda/ptx/warpgroup.cuh"

namespace flashq::cuda::sm90 {
namespace {

template <class C> __global__ void __launch_bounds__(C::kThreads, 1) prefill_kernel(const __grid_constant__ Params p) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ __align__(1024) uint8_t dynamic[];
  auto& shared = *reinterpret_cast<typename C::SharedMemory*>(dynamic);
  const int warp = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / 32, 0);
  ptx::allow_dependents();  // one that overlaps takes over multiprocessors as they get free
  if (threadIdx.x == 0) {
    for (const CUtensorMap* map : {&p.q, &p.k, &p.v}) ptx::prefetch_tensor_map(*map);
    shared.init_barriers();
    ptx::publish_barriers();
  }
  __syncthreads();
  if (warp < 4) {
    ptx::give_registers<C::kProducerRegisters>();
    if (warp == 2) {
      if (threadIdx.x == 64) produce_tiles<C>(p, shared);
      return;
    }
    ptx::wait_for_primary();
    if (warp == 0) {
      produce_keys<C, false>(p, shared);
    } else if (warp == 3) {
      produce_keys<C, true>(p, shared);
    } else if (threadIdx.x == 32) {
      produce_queries<C>(p, shared);
    }
  } else {
    ptx::take_registers<C::kConsumerRegisters>();
    ptx::wait_for_primary();
    consume<C>(p, shared);
  }
#else
  __trap();  // never launched
#endif
}

constexpr double kFewProducts = 1e10;  // some 60 us

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

template <class C> Schedule make_tile_schedule(const Attention16Params& a) {
  const QueryView& q = a.query;
  Schedule s = make_schedule(a, count_splits(a), C::kTileD * 4);
  s.kv_len = static_cast<int>(a.kv.page_size);
  const int64_t tiles = ceil_div(s.q_len * pack_of(q), C::kTileQ) * s.head_packs;
  s.tiles = static_cast<int>(tiles * s.batch + (q.cu_seqlens_q.given() ? q.batch * s.head_packs : 0));  // at most
  return s;
}

Cap make_cap(float multiplier, float scale_log2) {
  constexpr double kLargest = 0.32, kFactor[2] = {0.99983283, -0.32016982};  // least relative error up to it
  const double m = multiplier;
  Cap cap{.multiplier = multiplier,
          .largest_square = static_cast<float>(std::pow(kLargest / m, 2)),
          .exponent_factor = {}};
  for (int i = 0; i < 2; ++i)
    cap.exponent_factor[i] = static_cast<float>(kFactor[i] * std::pow(m, 2 * i + 1)) * scale_log2;
  // It falls, or its powers leave float32, or their products with the scale do.
  if (!(m > 1e-6 && m < 1e6) || !std::isfinite(cap.exponent_factor[0]) || !std::isfinite(cap.exponent_factor[1]))
    cap.largest_square = -1;
  return cap;
}

template <class C> Params make_params(const Attention16Params& a) {
  static_assert(C::kTileQ == tile_rows(C::kTileD, C::kGeneral));
  const QueryView& q = a.query;
  Params p{};
  p.q_batch_step = q.q_stride[0] != 0;
  p.k_batch_step = a.kv.k_stride[0] != 0;
  p.v_batch_step = a.kv.v_stride[0] != 0;
  p.out_rows = static_cast<uint16_t*>(q.out);
  std::copy_n(q.out_stride + 1, 2, p.out_stride);
  p.v_rows = static_cast<const uint16_t*>(a.kv.v);
  std::copy_n(a.kv.v_stride, 3, p.v_stride);
  p.head_dim = static_cast<int>(q.head_dim);
  p.lse = q.lse;
  std::copy_n(q.lse_stride, 3, p.lse_stride);
  p.sinks = a.score.sinks;
  p.sinks_stride = a.score.sinks_stride;
  p.packed_queries = q.cu_seqlens_q.given();
  p.shared_keys = a.kv.cu_seqlens_k.given() || is_cache(a);
  p.scale_log2 = a.score.scale * kLog2E;
  if (a.score.softcap > 0) {
    p.transform = Transform::kCap;
    p.scale_log2 = a.score.softcap * kLog2E;
    p.cap = make_cap(a.score.scale / a.score.softcap, p.scale_log2);
  } else if (!(a.score.scale > 0)) {
    p.transform = Transform::kMultiply;
    p.cap.multiplier = a.score.scale;
    p.scale_log2 = kLog2E;
  }
  p.pages = {.table = a.kv.block_table,
             .count = static_cast<int>(a.kv.num_pages),
             .size = static_cast<int>(a.kv.page_size),
             .box = a.kv.block_table.given() ? static_cast<int>(std::gcd(a.kv.page_size, C::kTileK)) : C::kTileK,
             .tile_pages = static_cast<int>(C::kTileK / a.kv.page_size),
             .tile_slots = static_cast<int>(C::kTileK % a.kv.page_size)};
  return p;
}

template <class C> Status run(const Attention16Params& a, const Device& device, const Launch& where) {
  const QueryView& q = a.query;
  const auto stream = static_cast<cudaStream_t>(where.stream);
  Params p = make_params<C>(a);
  p.schedule = make_tile_schedule<C>(a);
  Schedule& s = p.schedule;
  const int64_t pack = pack_of(q), pages = is_cache(a) ? a.kv.num_pages : s.batch;
  if (!(encode(q.q, q.q_stride, s.batch, s.q_len, q.q_heads, pack, C::kRows, q, p.q) &&
        encode(q.out, q.out_stride, s.batch, s.q_len, q.q_heads, pack, C::kRows, q, p.out) &&
        encode(a.kv.k, a.kv.k_stride, pages, a.kv.page_size, q.kv_heads, 1, p.pages.box, q, p.k) &&
        encode(a.kv.v, a.kv.v_stride, pages, a.kv.page_size, q.kv_heads, 1, p.pages.box, q, p.v)))
    return refuse_tensor_map();
  const auto plan = static_cast<Plan*>(a.scratch);
  const bool planned = q.cu_seqlens_q.given() || is_cache(a);
  if (planned) {
    launch_plan(a, s, C::kTileQ, where);
    s.plan = plan;
  }
  if (s.splits > 1) {
    const ScratchPlan scratch(a, s.splits);
    p.partial_out = reinterpret_cast<float*>(static_cast<char*>(a.scratch) + scratch.partial_out);
    p.partial_lse = reinterpret_cast<float*>(static_cast<char*>(a.scratch) + scratch.partial_lse);
  }
  // Drawing takes a memset ahead of the kernel (3 % of a call on 1024 tokens); where that is much, items go round
  // instead.
  const int64_t items = int64_t{s.tiles} * s.splits;
  const double products = static_cast<double>(s.tiles) * C::kTileQ * s.kv_len * C::kTileD;
  if (planned || products > kFewProducts) {
    s.drawn = &plan->drawn;
    if (!planned) cudaMemsetAsync(s.drawn, 0, sizeof *s.drawn, stream);
  } else if (items >= 3 * int64_t{device.sm_count}) {
    // A section is a round, so that all rounds load as much from device memory (2 to 4 % on sequences of 512).
    const int64_t row_blocks = ceil_div(s.q_len * pack, C::kTileQ) * s.splits * s.packs_per_kv;
    const int64_t heads = std::max<int64_t>((device.sm_count + row_blocks / 2) / row_blocks, 1);
    s.l2_keys = static_cast<int>(std::min<int64_t>(s.l2_keys, heads * s.kv_len));
  }
  constexpr int kSharedBytes = sizeof(typename C::SharedMemory);
  opt_in<prefill_kernel<C>>(where.device, kSharedBytes);
  const auto grid = static_cast<unsigned>(std::min<int64_t>(device.sm_count, items));
  launch_overlapping(prefill_kernel<C>, dim3(grid), C::kThreads, kSharedBytes, device, where, p);
  if (s.splits > 1) launch_merge(q, p.partial_out, p.partial_lse, s.splits, device, where);
  return launch_status();
}

template <class Element, int kTileD> Status run(const Attention16Params& p, const Device& device, const Launch& where) {
  if (is_general(p)) return run<Traits<Element, kTileD, true>>(p, device, where);
  return run<Traits<Element, kTileD, false>>(p, device, where);
}

}  // namespace

template <int kTileD> Status launch_prefill(const Attention16Params& p, const Device& device, const Launch& where) {
  if (p.query.dtype == Dtype::kBfloat16) return run<Bfloat16, kTileD>(p, device, where);
  return run<Float16, kTileD>(p, device, where);
}

}  // namespace flashq::cuda::sm90
