// How many clusters of thread blocks a GPU can hold.
#pragma once
#include <cuda_runtime_api.h>

#include <atomic>
#include <cstdint>

namespace flashq::cuda {

// How many clusters run at a time; 0 where none can, for not every GPU holds those of more than 8 CTAs. A kernel serves
// kShapes shapes. The first `config` of each speaks for all of its calls: they have as many threads and CTAs of a
// cluster, and as many of their CTAs fit the shared memory of a multiprocessor.
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
