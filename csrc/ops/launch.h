// From an op to the backend of its device: the function table, the threads or the stream, memory.
#pragma once
#include <torch/csrc/stable/accelerator.h>

#include "backend.h"
#include "index_checks.h"
#include "ops/checks.h"

namespace flashq {

// One call of an op on the device of its leading tensor. On CUDA it holds a device guard: it has to outlive the launch.
class Call {
 public:
  Call(const Op& op, const Tensor& leader);

  [[nodiscard]] bool on_cpu() const { return on_cpu_; }
  // A new contiguous tensor on the call's device; its memory is not written.
  [[nodiscard]] Tensor empty(torch::headeronly::IntHeaderOnlyArrayRef size, ScalarType dtype) const;
  // Scratch of `bytes`, 64-byte aligned; `owner` keeps it alive (torch's allocator takes it back in stream order).
  [[nodiscard]] void* scratch(int64_t bytes, std::optional<Tensor>& owner) const;

  // On the CPU: refuses what index tensors must not hold. On CUDA only the device knows their values.
  template <class Params> void check_values(const Params& params) const {
    if (!on_cpu_) return;
    const int64_t items = count_items(params);
    for (int64_t i = 0; i < items; ++i) refuse(check_item(params, i));
    if constexpr (requires { check_pages(params, 0, 0, 1); })
      for (int64_t i = 0; i < items; ++i) refuse(check_pages(params, i, 0, 1));
  }

  // Runs one entry of the backend's table. An op that the backend lacks, and what the backend reports, become
  // exceptions.
  template <class Params> void run(Status (*Backend::*entry)(const Params&, const Launch&),
                                   const Params& params) const {
    check(require(entry)(params, launch_));
  }
  // The same for what an op does after its first entry, which has looked at the index tensors.
  template <class Params> void run_next(Status (*Backend::*entry)(const Params&, const Launch&),
                                        const Params& params) const {
    Launch launch = launch_;
    launch.check = false;
    check(require(entry)(params, launch));
  }
  // The same for an attention op, with the scratch that the backend asks for.
  template <class Params>
  void run(Status (*Backend::*entry)(const Params&, const Launch&),
           int64_t (*Backend::*scratch_bytes)(const Params&, const Launch&), Params& params) const {
    const auto kernel = require(entry);
    std::optional<Tensor> owner;
    params.scratch = scratch((backend_->*scratch_bytes)(params, launch_), owner);
    check(kernel(params, launch_));
  }

 private:
  template <class Function> [[nodiscard]] Function require(Function Backend::* entry) const {
    if (!(backend_->*entry)) refuse_missing();
    return backend_->*entry;
  }
  void refuse(const IndexFault& fault) const {
    if (fault.found()) op_.refuse(fault.argument(), fault.expected(), std::to_string(fault.got));
  }
  void check(const Status& status) const;
  [[noreturn]] void refuse_missing() const;

  Op op_;
  const Backend* backend_;
  bool on_cpu_;
  Launch launch_;
  std::optional<torch::stable::accelerator::DeviceGuard> guard_;
};

// FLASHQ_CHECK=1 in the environment when the library was loaded.
[[nodiscard]] bool check_mode();

}  // namespace flashq
