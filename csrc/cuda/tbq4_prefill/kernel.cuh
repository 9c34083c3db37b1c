// The kernels of one head dim.
#pragma once
#include "cuda/opt_in.h"
#include "cuda/overlapping_launch.h"
#include "cuda/ptx/warpgroup.cuh"
#include "cuda/tbq4_prefill/consumer.cuh"
#include "cuda/tbq4_prefill/describer.cuh"
#include "cuda/tbq4_prefill/expander.cuh"
#include "cuda/tbq4_prefill/launch.h"
#include "cuda/tbq4_prefill/loader.cuh"

namespace flashq::cuda::tbq4_sm90 {
namespace {

template <class C>
__global__ void __launch_bounds__(C::kThreads, 1) prefill_kernel(const __grid_constant__ Params p) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ __align__(1024) uint8_t dynamic[];
  auto& shared = *reinterpret_cast<typename C::SharedMemory*>(dynamic);
  ptx::allow_dependents();
  if (threadIdx.x == 0) {
    ptx::prefetch_tensor_map(p.q);
    shared.init_barriers();
    ptx::publish_barriers();
  }
  if (threadIdx.x < C::kTileK / 4) shared.ones[threadIdx.x] = 1;
  if (threadIdx.x < 32) shared.levels[threadIdx.x] = p.levels;
  __syncthreads();
  ptx::wait_for_primary();
  const int warp = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / 32, 0);
  if (warp < C::kProducers) {
    ptx::give_registers<C::kProducerRegisters>();
    if (warp == C::kLoader)
      Loader<C>(p, shared).run();
    else if (warp == C::kDescriber)
      Describer<C>(p, shared).run();
    else
      Expander<C>(p, shared).run();
  } else {
    ptx::take_registers<C::kConsumerRegisters>();
    Consumer<C>(p, shared).run();
  }
#else
  __trap();  // never launched
#endif
}

template <class C> void start(const Params& p, unsigned blocks, const Device& device, const Launch& where) {
  constexpr int kSharedBytes = sizeof(typename C::SharedMemory);
  opt_in<prefill_kernel<C>>(where.device, kSharedBytes);
  launch_overlapping(prefill_kernel<C>, dim3(blocks), C::kThreads, kSharedBytes, device, where, p);
}

}  // namespace

template <int kDim> void launch_prefill(const Params& p, unsigned blocks, const Device& device, const Launch& where) {
  p.call.kv.k_offsets ? start<Traits<kDim, true>>(p, blocks, device, where)
                      : start<Traits<kDim, false>>(p, blocks, device, where);
}

}  // namespace flashq::cuda::tbq4_sm90
