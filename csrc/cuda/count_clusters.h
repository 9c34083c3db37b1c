// Clusters of thread blocks: how many a GPU can hold, and launches that all run at once.
#pragma once
#include <cuda_runtime_api.h>

#include <atomic>
#include <cstdint>

namespace flashq::cuda {

inline constexpr int kMaxCluster = 16, kClusterSizes = 5;  // CTAs: 1, 2, 4, 8, 16

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

// Halves the clusters of a launch until all run at once, because a second wave takes longer: of 8 CTAs an H200 holds
// fewer than 16, though it has 132 multiprocessors, and decode of 1 x 4096 with 16/16 heads takes 14.3 us in clusters
// of 4 instead of 20.2. `cluster`: the attribute of `config`; `p`: the kernel's parameters, which say the same.
template <auto kKernel, int kShapes = 1, class Params>
void halve_clusters(cudaLaunchConfig_t& config, cudaLaunchAttribute& cluster, Params& p, int32_t device,
                    int shape = 0) {
  const int clusters = p.cluster_ctas > 1 ? static_cast<int>(config.gridDim.x) / p.cluster_ctas : 0;
  const auto resident = [&] {
    return count_clusters<kKernel, kShapes * kClusterSizes>(config, device, shape * kClusterSizes + p.cluster_shift);
  };
  while (p.cluster_ctas > 2 && resident() < clusters) {
    p.cluster_ctas /= 2;
    --p.cluster_shift;
    config.gridDim.x /= 2;
    cluster.val.clusterDim.x /= 2;
  }
}

}  // namespace flashq::cuda
