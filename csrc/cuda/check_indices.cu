#include <cuda_runtime_api.h>

#include <atomic>
#include <cstdio>
#include <map>
#include <mutex>

#include "cuda/check_indices.h"
#include "cuda/launch.h"
#include "index_checks.h"

namespace flashq::cuda {
namespace {

// In pinned host memory: kernels write it where it stands, and nothing has to be copied back.
struct Finding {
  int32_t complete = 0;  // written last
  int32_t writing = 0;   // 1 while a kernel writes; the host leaves it alone, as the GPU's atomics bind the GPU alone
  const char* op = nullptr;  // the host's; the device only passes it on
  IndexFault fault;
};

constexpr int kThreads = 1024;

// The first report since the last one that was raised wins.
__device__ void report(const IndexFault& fault, const char* op, Finding* finding) {
  if (atomicExch(&finding->writing, 1)) return;
  if (!*static_cast<volatile int32_t*>(&finding->complete)) {
    finding->op = op;
    finding->fault = fault;
    __threadfence_system();
    *static_cast<volatile int32_t*>(&finding->complete) = 1;
    __threadfence_system();
  }
  atomicExch(&finding->writing, 0);
}

// All threads call it. Reports the fault with the least key, if any; returns whether there was one.
__device__ bool report_first(const IndexFault& fault, int64_t key, const char* op, Finding* finding) {
  __shared__ unsigned long long least;
  if (!__syncthreads_or(fault.found())) return false;
  if (threadIdx.x == 0) least = ~0ull;
  __syncthreads();
  if (fault.found()) atomicMin(&least, static_cast<unsigned long long>(key));
  __syncthreads();
  if (fault.found() && least == static_cast<unsigned long long>(key)) report(fault, op, finding);
  return true;
}

// One block, so that the fault is the one that the CPU would have named.
template <class Params> __global__ void __launch_bounds__(kThreads)
    check_kernel(const __grid_constant__ Params p, int64_t items, const char* op, Finding* finding) {
  for (int64_t base = 0; base < items; base += kThreads) {
    const int64_t i = base + threadIdx.x;
    if (report_first(i < items ? check_item(p, i) : IndexFault{}, i, op, finding)) return;
  }
  if constexpr (requires { check_pages(p, 0, 0, 1); })
    for (int64_t i = 0; i < items; ++i) {
      const IndexFault fault = check_pages(p, i, threadIdx.x, kThreads);
      if (report_first(fault, fault.entry, op, finding)) return;
    }
}

Status failure(const char* expected, cudaError_t error) {
  Status status;
  std::snprintf(status.message, sizeof status.message, "FLASHQ_CHECK: expected %s, got %s (%s)", expected,
                cudaGetErrorName(error), cudaGetErrorString(error));
  return status;
}

// A device's finding, made when it is first asked for. A capture on another thread would forbid the allocation, which
// has nothing to do with it: hence the relaxed mode.
Status find_finding(int32_t device, Finding*& finding) {
  static std::mutex mutex;
  static std::map<int32_t, Finding*> findings;  // never freed: kernels may run until the process ends
  const std::scoped_lock lock(mutex);
  Finding*& found = findings[device];
  if (!found) {
    cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
    cudaError_t error = cudaThreadExchangeStreamCaptureMode(&mode);
    if (error) return failure("pinned memory", error);
    void* memory = nullptr;
    error = cudaHostAlloc(&memory, sizeof(Finding), cudaHostAllocPortable | cudaHostAllocMapped);
    const cudaError_t restored = cudaThreadExchangeStreamCaptureMode(&mode);
    if (error || restored) return failure("pinned memory", error ? error : restored);
    found = new (memory) Finding{};
  }
  finding = found;
  return {};
}

template <class Params> Status check(const Params& p, const char* op, const Launch& launch) {
  const int64_t items = count_items(p);
  if (items == 0) return {};
  Finding* finding = nullptr;
  if (const Status status = find_finding(launch.device, finding); !status.ok()) return status;
  check_kernel<<<1, kThreads, 0, static_cast<cudaStream_t>(launch.stream)>>>(p, items, op, finding);
  return launch_status();
}

}  // namespace

Status raise_finding(const Launch& launch) {
  Finding* finding = nullptr;
  if (const Status status = find_finding(launch.device, finding); !status.ok()) return status;
  const auto stream = static_cast<cudaStream_t>(launch.stream);
  cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
  if (cudaStreamIsCapturing(stream, &capture) || capture != cudaStreamCaptureStatusNone) {
    (void)cudaGetLastError();  // the legacy stream may not even be asked while another one captures
    return {};
  }
  if (const cudaError_t error = cudaStreamSynchronize(stream)) return failure("earlier kernels to succeed", error);
  const std::atomic_ref<int32_t> complete(finding->complete);
  if (!complete.load(std::memory_order_acquire)) return {};
  const IndexFault& fault = finding->fault;
  Status status;
  std::snprintf(status.message, sizeof status.message, "%s of an earlier %s: expected %s, got %lld",
                fault.argument().c_str(), finding->op, fault.expected().c_str(), static_cast<long long>(fault.got));
  complete.store(0, std::memory_order_release);
  return status;
}

Status check_indices(const Attention16Params& p, const Launch& launch) {
  return check(p, p.kv.cu_seqlens_k.given() ? "prefill_varlen" : "decode", launch);
}
Status check_indices(const AttentionTbq4Params& p, const Launch& launch) { return check(p, "tbq4_attention", launch); }
Status check_indices(const KvAppendParams& p, const Launch& launch) { return check(p, "kv_append_", launch); }
Status check_indices(const Tbq4AppendParams& p, const Launch& launch) { return check(p, "tbq4_append_", launch); }
Status check_indices(const Tbq4RopeAppendParams& p, const Launch& launch) {
  return check(p, "tbq4_rope_append_", launch);
}
Status check_indices(const PageOffsetsParams& p, const Launch& launch) {
  return check(p, "tbq4_page_offsets_", launch);
}

}  // namespace flashq::cuda
