// Launches the kernels for many blocks, where there is enough to do and the GPU has room for them.
#pragma once
#include "core/portability.h"
#include "cuda/launch.h"
#include "cuda/opt_in.h"
#include "cuda/overlapping_launch.h"

namespace flashq::cuda {

// With fewer blocks a multiprocessor, or fewer warps, the kernels for few blocks are as fast. On an H200, 8 heads of
// 128: keys and values of 256 tokens, 16 blocks a multiprocessor of each, take 3.2 us here and 4.1 there, those of 2048
// tokens 7.3 and 15.4.
inline constexpr int kLeastBlocks = 8, kLeastWarps = 4;

// Groups of so many blocks, or 0: too few to be worth it, or more than the kernels can count.
[[nodiscard]] inline int bulk_groups(int64_t blocks, int group_blocks, const Device& device) {
  const int64_t groups = ceil_div(blocks, group_blocks);
  return blocks < int64_t{kLeastBlocks} * device.sm_count || groups > 1 << 30 ? 0 : static_cast<int>(groups);
}

// False: nothing was launched, the caller takes its other kernel.
template <auto kKernel, class Job> [[nodiscard]] bool launch_bulk(const Job& job, const Device& device,
                                                                  const Launch& launch) {
  using Plan = typename Job::Plan;
  int warps = Plan::kMaxWarps;
  while (warps >= kLeastWarps && Plan::shared_bytes(warps) > device.shared_bytes) --warps;
  if (warps < kLeastWarps || !opt_in<kKernel>(launch.device, Plan::shared_bytes(warps))) return false;
  launch_overlapping(kKernel, dim3(static_cast<unsigned>(device.sm_count)), 32 * warps, Plan::shared_bytes(warps),
                     device, launch, job);
  return true;
}

}  // namespace flashq::cuda
