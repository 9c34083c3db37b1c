#include "ops/launch.h"

#include <dlfcn.h>
#include <torch/csrc/stable/ops.h>

#include <array>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <exception>

#include "exports.h"

namespace flashq {
namespace {

std::atomic<const Backend*> cuda_backend{nullptr};

// torch's own thread pool. A body gets every worker number once, whatever pieces at::parallel_for makes of the range.
void parallel(int32_t workers, void (*body)(void*, int32_t), void* context) {
  torch::stable::parallel_for(0, workers, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) body(context, static_cast<int32_t>(i));
  });
}

// torch's current stream. The symbol lives in libtorch_cuda, which a CUDA tensor proves to be loaded; not linking it
// keeps this library usable under a CPU build of torch.
void* current_stream(const Op& op, int32_t device) {
  using Getter = int32_t (*)(int32_t, void**);
  static const auto get = [] {
    void* torch_cuda = dlopen("libtorch_cuda.so", RTLD_NOLOAD | RTLD_LAZY);
    return torch_cuda ? reinterpret_cast<Getter>(dlsym(torch_cuda, "aoti_torch_get_current_cuda_stream")) : nullptr;
  }();
  void* stream = nullptr;
  if (!get || get(device, &stream) != 0)
    op.refuse("device", "a CUDA build of torch that offers aoti_torch_get_current_cuda_stream (2.10 or newer)", "none");
  return stream;
}

int32_t shim_dtype(ScalarType dtype) {
  switch (dtype) {
    case ScalarType::Float: return aoti_torch_dtype_float32();
    case ScalarType::Half: return aoti_torch_dtype_float16();
    case ScalarType::BFloat16: return aoti_torch_dtype_bfloat16();
    default: return aoti_torch_dtype_uint8();  // codes and scratch
  }
}

const Backend* backend_of(const Op& op, const Tensor& leader) {
  if (leader.is_cpu()) return &cpu_backend();
  if (!leader.is_cuda()) op.refuse("device", "cpu or cuda", device_of(leader));
  const Backend* backend = cuda_backend.load(std::memory_order_acquire);
  if (!backend)
    op.refuse(
        "device",
        "cpu, because this flashq has no CUDA library (install it again with nvcc on PATH; `python -m flashq info` "
        "says what is missing)",
        device_of(leader));
  return backend;
}

}  // namespace

Call::Call(const Op& op, const Tensor& leader) : op_(op), backend_(backend_of(op, leader)), on_cpu_(leader.is_cpu()) {
  if (on_cpu_) {
    launch_.workers = static_cast<int32_t>(torch::stable::get_num_threads());
    launch_.parallel = parallel;
    return;
  }
  launch_.device = leader.get_device_index();
  guard_.emplace(launch_.device);
  launch_.stream = current_stream(op, launch_.device);
  launch_.check = check_mode();
}

// By the shim's own function: through torch's dispatcher, as torch::stable::empty goes, a tensor takes about 2 us
// longer.
Tensor Call::empty(torch::headeronly::IntHeaderOnlyArrayRef size, ScalarType dtype) const {
  std::array<int64_t, kMaxLeading + 1> stride;
  int64_t elements = 1;
  bool fits = size.size() <= stride.size();
  for (size_t i = size.size(); fits && i-- > 0;) {
    stride[i] = elements;
    fits = !__builtin_mul_overflow(elements, max_of<int64_t>(size[i], 1), &elements);
  }
  AtenTensorHandle made = nullptr;
  if (!fits ||
      aoti_torch_empty_strided(static_cast<int64_t>(size.size()), size.data(), stride.data(), shim_dtype(dtype),
                               on_cpu_ ? aoti_torch_device_type_cpu() : aoti_torch_device_type_cuda(),
                               max_of(launch_.device, 0), &made) != 0) {
    std::string shape;
    for (const int64_t n : size) shape += (shape.empty() ? "" : ", ") + std::to_string(n);
    op_.refuse("memory", "room for a tensor (" + shape + ") of " + to_text(dtype), "an error from torch's allocator");
  }
  return Tensor(made);
}

void* Call::scratch(int64_t bytes, std::optional<Tensor>& owner) const {
  constexpr uintptr_t kAlign = 64;
  if (bytes == 0) return nullptr;
  owner = empty({bytes + static_cast<int64_t>(kAlign)}, ScalarType::Byte);
  const auto at = reinterpret_cast<uintptr_t>(owner->mutable_data_ptr());
  return reinterpret_cast<void*>((at + kAlign - 1) / kAlign * kAlign);
}

void Call::check(const Status& status) const {
  if (!status.ok()) op_.fail(status.message);
}

void Call::refuse_missing() const {
  op_.refuse("device", "cpu, because this version of flashq has no CUDA kernel for this op",
             "cuda:" + std::to_string(launch_.device));
}

bool check_mode() {
  static const bool on = [] {
    const char* value = std::getenv("FLASHQ_CHECK");
    return value && std::strcmp(value, "1") == 0;
  }();
  return on;
}

}  // namespace flashq

extern "C" int flashq_register_cuda_backend(const flashq::Backend* backend) {
  if (backend->abi != flashq::kBackendAbi) return -1;
  flashq::cuda_backend.store(backend, std::memory_order_release);
  return 0;
}

extern "C" const char* flashq_describe_backend(bool cuda) {
  const flashq::Backend* backend = cuda ? flashq::cuda_backend.load(std::memory_order_acquire) : &flashq::cpu_backend();
  return backend ? backend->describe() : nullptr;
}
