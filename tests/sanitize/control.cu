// One bug for each tool of compute-sanitizer: if a tool does not find its own, it finds nothing in flashq's kernels
// either.
#include <cuda_runtime.h>

#include <cstdio>
#include <string_view>

namespace {

constexpr int kThreads = 64;

__global__ void write_past_the_end(int* data) { data[kThreads + threadIdx.x] = 1; }

__global__ void read_without_a_barrier(int* data) {
  __shared__ int values[kThreads];
  values[threadIdx.x] = static_cast<int>(threadIdx.x);
  data[threadIdx.x] = values[kThreads - 1 - threadIdx.x];
}

__global__ void read_uninitialized(int* data) { data[threadIdx.x] += 1; }

__global__ void wait_in_a_branch(int* data) {
  if (threadIdx.x < kThreads / 2 + 16) __syncthreads();
  data[threadIdx.x] = 1;
}

}  // namespace

int main(int count, char** arguments) {
  const std::string_view tool = count > 1 ? arguments[1] : "";
  int* data = nullptr;
  if (cudaMalloc(&data, kThreads * sizeof(int)) != cudaSuccess) return 2;
  if (tool == "memcheck") write_past_the_end<<<1, kThreads>>>(data);
  if (tool == "racecheck") read_without_a_barrier<<<1, kThreads>>>(data);
  if (tool == "initcheck") read_uninitialized<<<1, kThreads>>>(data);
  if (tool == "synccheck") wait_in_a_branch<<<1, kThreads>>>(data);
  std::printf("%s: %s\n", arguments[0], cudaGetErrorString(cudaDeviceSynchronize()));
  return 0;
}
