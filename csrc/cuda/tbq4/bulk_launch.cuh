// Launches the kernels that hold a block in a thread, where there is enough to do and the GPU has room for them.
#pragma once
#include "core/portability.h"
#include "cuda/launch.h"
#include "cuda/opt_in.h"

namespace flashq::cuda {

// With fewer groups of 32 blocks a multiprocessor, or fewer warps, more lanes a block are faster.
inline constexpr int kLeastGroups = 4, kLeastWarps = 4;

// Groups of 32 blocks, or 0: too few of them to be worth it, or more than the kernels can count.
[[nodiscard]] inline int bulk_groups(int64_t blocks, const Device& device) {
  const int64_t groups = ceil_div(blocks, 32);
  return groups < int64_t{kLeastGroups} * device.sm_count || groups > 1 << 30 ? 0 : static_cast<int>(groups);
}

// False: nothing was launched, the caller takes its other kernel.
template <auto kKernel, class Job> [[nodiscard]] bool launch_bulk(const Job& job, const Device& device,
                                                                  const Launch& launch) {
  using Plan = typename Job::Plan;
  int warps = Plan::kMaxWarps;
  while (warps >= kLeastWarps && Plan::shared_bytes(warps) > device.shared_bytes) --warps;
  if (warps < kLeastWarps || !opt_in<kKernel>(launch.device, Plan::shared_bytes(warps))) return false;
  kKernel<<<static_cast<unsigned>(device.sm_count), 32 * warps, Plan::shared_bytes(warps),
            static_cast<cudaStream_t>(launch.stream)>>>(job);
  return true;
}

}  // namespace flashq::cuda
