// How many clusters of thread blocks a GPU can hold.
#pragma once
#include <cuda_runtime_api.h>

#include <atomic>
#include <cstdint>

namespace flashq::cuda {

// How many clusters run at a time; 0 where they cannot, as those of more CTAs than every GPU can hold. A kernel serves
// kShapes shapes, each always with the same threads, shared memory and CTAs of a cluster, those of `config`.
template <auto kKernel, int kShapes = 1>
int count_clusters(const cudaLaunchConfig_t& config, int32_t device, int shape = 0) {
  static std::atomic<int> known[kShapes][64];  // plus one
  std::atomic<int> none{0}, &answer = device < 64 ? known[shape][device] : none;
  if (answer.load(std::memory_order_relaxed) == 0) {
    int clusters = 0;
    if (cudaFuncSetAttribute(kKernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1) ||
        cudaOccupancyMaxActiveClusters(&clusters, kKernel, &config)) {
      clusters = 0;
      (void)cudaGetLastError();
    }
    answer.store(clusters + 1, std::memory_order_relaxed);
  }
  return answer.load(std::memory_order_relaxed) - 1;
}

}  // namespace flashq::cuda
