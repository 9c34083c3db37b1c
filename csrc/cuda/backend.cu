// The table of the CUDA backend, which the library hands to libflashq.so when it loads, and what Python asks about
// GPUs.
#include <cuda_runtime_api.h>

#include <cstdio>
#include <string>

#include "backend.h"
#include "cuda/check_indices.h"
#include "cuda/kernels.h"
#include "cuda/launch.h"
#include "exports.h"

namespace flashq::cuda {
namespace {

const char* describe() {
  static const std::string text = "CUDA " + std::to_string(CUDART_VERSION / 1000) + "." +
                                  std::to_string(CUDART_VERSION % 1000 / 10) +
                                  ", compute capability " FLASHQ_CUDA_ARCHS;
  return text.c_str();
}

// An entry of the table. Under FLASHQ_CHECK=1 a call first raises what earlier ones found.
template <auto kOp, class Params> Status checked(const Params& p, const Launch& launch) {
  if (launch.check) {
    if (const Status status = enter(launch); !status.ok()) return status;
    if (const Status status = raise_finding(launch); !status.ok()) return status;
    if constexpr (requires { check_indices(p, launch); })
      if (const Status status = check_indices(p, launch); !status.ok()) return status;
  }
  return kOp(p, launch);
}

constexpr Backend kBackend{
    .abi = kBackendAbi,
    .attention_16_scratch_bytes = attention_16_scratch_bytes,
    .attention_tbq4_scratch_bytes = attention_tbq4_scratch_bytes,
    .prefill = checked<prefill>,
    .decode = checked<decode>,
    .tbq4_attention = checked<tbq4_attention>,
    .kv_append = checked<kv_append>,
    .tbq4_append = checked<tbq4_append>,
    .tbq4_rope_append = checked<tbq4_rope_append>,
    .tbq4_page_offsets = checked<tbq4_page_offsets>,
    .tbq4_quantize = checked<tbq4_quantize>,
    .tbq4_dequantize = checked<tbq4_dequantize>,
    .tbq4_rotate = checked<tbq4_rotate>,
    .merge_states = checked<merge_states>,
    .describe = describe,
};

// Of another build than libflashq.so the table stays unregistered; the loader sees that and says so.
[[maybe_unused]] const int registered = flashq_register_cuda_backend(&kBackend);

void copy_text(const char* text, char* to, int32_t size) {
  if (size > 0) std::snprintf(to, static_cast<size_t>(size), "%s", text);
}

}  // namespace
}  // namespace flashq::cuda

// The number of GPUs. 0 where there is no GPU or no driver; `problem` then says which, in CUDA's words.
FLASHQ_EXPORT int32_t flashq_cuda_device_count(char* problem, int32_t problem_size) {
  int count = 0;
  const cudaError_t error = cudaGetDeviceCount(&count);
  flashq::cuda::copy_text(error ? cudaGetErrorString(error) : "", problem, problem_size);
  return error ? 0 : count;
}

// One GPU: its name, compute capability and the shared memory in bytes that a block can opt in to. 0, or a cudaError_t.
FLASHQ_EXPORT int32_t flashq_cuda_device(int32_t device, char* name, int32_t name_size, int32_t* major, int32_t* minor,
                                         int64_t* shared_bytes) {
  cudaDeviceProp properties;
  const cudaError_t error = cudaGetDeviceProperties(&properties, device);
  if (error) return error;
  flashq::cuda::copy_text(properties.name, name, name_size);
  *major = properties.major;
  *minor = properties.minor;
  *shared_bytes = static_cast<int64_t>(properties.sharedMemPerBlockOptin);
  return 0;
}

// What the kernels for one GPU are chosen by, after FLASHQ_CUDA_ARCH and FLASHQ_CUDA_SMEM: the architecture as 90, and
// bytes of shared memory. What is wrong goes to `problem`, without "flashq::op: ", else that is empty.
FLASHQ_EXPORT void flashq_cuda_configuration(int32_t device, int32_t* arch, int64_t* shared_bytes, char* problem,
                                             int32_t problem_size) {
  flashq::cuda::Device description{};
  const flashq::Status status = flashq::cuda::describe_device(device, description);
  *arch = description.arch;
  *shared_bytes = description.shared_bytes;
  flashq::cuda::copy_text(status.message, problem, problem_size);
}

// What an op says of a GPU of this compute capability, without "flashq::op: "; empty where flashq has kernels for it.
FLASHQ_EXPORT void flashq_cuda_check_capability(int32_t major, int32_t minor, char* message, int32_t size) {
  flashq::cuda::copy_text(flashq::cuda::check_capability(major, minor).message, message, size);
}

// What an op says of these values of FLASHQ_CUDA_ARCH and FLASHQ_CUDA_SMEM (null: not set), without "flashq::op: ";
// empty where they are in order.
FLASHQ_EXPORT void flashq_cuda_check_overrides(const char* arch, const char* shared_bytes, char* message,
                                               int32_t size) {
  flashq::cuda::Overrides overrides;
  flashq::cuda::copy_text(flashq::cuda::parse_overrides(arch, shared_bytes, overrides).message, message, size);
}

// The scratch that tbq4_attention takes of a cache with a page table, causal and without options. Needs no GPU.
FLASHQ_EXPORT int64_t flashq_cuda_tbq4_scratch_bytes(int64_t batch, int64_t q_len, int64_t q_heads, int64_t kv_heads,
                                                     int64_t head_dim, int64_t tokens, int32_t offsets) {
  static constexpr uint16_t kSome = 0;
  flashq::AttentionTbq4Params p{};
  p.query.batch = batch;
  p.query.q_len = q_len;
  p.query.total_tokens = batch * q_len;
  p.query.q_heads = q_heads;
  p.query.kv_heads = kv_heads;
  p.query.head_dim = head_dim;
  p.score = {.scale = 1,
             .softcap = 0,
             .causal = true,
             .window_left = -1,
             .window_right = -1,
             .sinks = nullptr,
             .sinks_stride = 0};
  p.kv.page_size = 64;
  p.kv.max_pages = flashq::ceil_div(tokens, 64);
  p.kv.num_pages = batch * p.kv.max_pages;
  p.kv.block_table.data = &kSome;
  p.kv.k_offsets = offsets ? &kSome : nullptr;
  return flashq::cuda::attention_tbq4_scratch_bytes(p, {});
}
