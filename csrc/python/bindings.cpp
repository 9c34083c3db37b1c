// The Python module flashq._C: facts about the build and the machine. No tensors; the ops are reached through torch.
#include <dlfcn.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <map>
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

#include "core/tbq4/codebook.h"
#include "core/work_plan.h"
#include "exports.h"

namespace py = pybind11;

namespace {

std::map<std::string, std::string> build_info() {
  return {{"version", flashq_version()},
          {"compiler", flashq_compiler()},
          {"torch", flashq_built_torch()},
          {"cuda_archs", flashq_cuda_archs()}};
}

void set_cpu_isa(const std::string& name) {
  if (flashq_set_cpu_isa(name.c_str()) != 0)
    throw py::value_error("flashq::set_cpu_isa: name: expected one of " + std::string(flashq_cpu_isa_levels()) +
                          ", got " + name);
}

std::map<std::string, bool> cpu_features() {
  std::map<std::string, bool> features;
#if defined(__x86_64__)
#define FLASHQ_ADD(name) features[name] = __builtin_cpu_supports(name) != 0  // the builtin takes literals only
  FLASHQ_ADD("avx2");
  FLASHQ_ADD("fma");
  FLASHQ_ADD("f16c");
  FLASHQ_ADD("bmi2");
  FLASHQ_ADD("avx512f");
  FLASHQ_ADD("avx512bw");
  FLASHQ_ADD("avx512vl");
  FLASHQ_ADD("avx512dq");
  FLASHQ_ADD("avx512vnni");
  FLASHQ_ADD("avx512bf16");
#undef FLASHQ_ADD
#endif
  return features;
}

// A function of libflashq_cuda.so, which _C cannot link to, because many builds have none.
template <class Function> Function* cuda_function(const char* name) {
  void* library = dlopen("libflashq_cuda.so", RTLD_NOLOAD | RTLD_LAZY);
  void* symbol = library ? dlsym(library, name) : nullptr;
  if (library) dlclose(library);  // the count that RTLD_NOLOAD added; the loader's own stays
  return reinterpret_cast<Function*>(symbol);
}

std::vector<py::dict> gpus() {
  std::vector<py::dict> found;
  const auto count = cuda_function<int32_t(char*, int32_t)>("flashq_cuda_device_count");
  const auto describe =
      cuda_function<int32_t(int32_t, char*, int32_t, int32_t*, int32_t*, int64_t*)>("flashq_cuda_device");
  const auto configure = cuda_function<void(int32_t, int32_t*, int64_t*, char*, int32_t)>("flashq_cuda_configuration");
  if (!count || !describe || !configure) return found;
  const int32_t devices = count(nullptr, 0);
  for (int32_t device = 0; device < devices; ++device) {
    char name[256] = {};
    char problem[480] = {};
    int32_t major = 0, minor = 0, kernel_arch = 0;
    int64_t shared_bytes = 0, kernel_shared_bytes = 0;
    if (describe(device, name, sizeof name, &major, &minor, &shared_bytes) != 0) continue;
    configure(device, &kernel_arch, &kernel_shared_bytes, problem, sizeof problem);
    py::dict gpu;
    gpu["index"] = device;
    gpu["name"] = name;
    gpu["capability"] = std::tuple(major, minor);
    gpu["shared_bytes"] = shared_bytes;
    gpu["kernel_arch"] = kernel_arch;
    gpu["kernel_shared_bytes"] = kernel_shared_bytes;
    gpu["problem"] = std::string(problem);
    found.push_back(gpu);
  }
  return found;
}

std::vector<float> tbq4_codebook(int64_t head_dim) {
  using namespace flashq::tbq4;
  const int width = block_width(head_dim);
  if (width == 0)
    throw py::value_error("flashq::tbq4_codebook: head_dim: expected 64, 128 or 256, got " + std::to_string(head_dim));
  const auto& table = width == 64 ? kCentroids64 : kCentroids128;
  return {table.value, table.value + kLevels};
}

std::tuple<int64_t, int64_t, int64_t> work_plan(int64_t begin, int64_t end, int64_t rows, int64_t kv_chunk) {
  if (begin < 0) throw py::value_error("flashq::work_plan: begin: expected at least 0, got " + std::to_string(begin));
  if (end > int64_t{1} << 62)
    throw py::value_error("flashq::work_plan: end: expected at most 2^62, got " + std::to_string(end));
  if (rows < 1) throw py::value_error("flashq::work_plan: rows: expected at least 1, got " + std::to_string(rows));
  if (kv_chunk != 0 && (kv_chunk < 256 || kv_chunk % 64 != 0))
    throw py::value_error("flashq::work_plan: kv_chunk: expected 0 or a multiple of 64 from 256 on, got " +
                          std::to_string(kv_chunk));
  const flashq::SplitPlan plan = flashq::plan_splits({begin, end}, rows, kv_chunk);
  return {plan.keys, plan.first, plan.count};
}

}  // namespace

PYBIND11_MODULE(_C, m) {
  m.doc() = "Facts about flashq's build and this machine.";
  m.def("build_info", build_info,
        "The version, the compiler, the torch built against, and the CUDA architectures ('' without CUDA), as texts.");
  m.def(
      "cpu_isa", [] { return std::string(flashq_cpu_isa() ? flashq_cpu_isa() : ""); },
      "The ISA level that the CPU kernels run at; '' where FLASHQ_CPU_ISA names none that this CPU has.");
  m.def(
      "cpu_isa_levels", [] { return std::string(flashq_cpu_isa_levels()); },
      "The levels that this build and this CPU have, as 'portable, avx2', slowest first.");
  m.def("set_cpu_isa", set_cpu_isa, py::arg("name"),
        "Run the CPU kernels at another of cpu_isa_levels() from the next call on. Raises ValueError for any other.");
  m.def("cpu_features", cpu_features, "Which instruction sets of those that choose the level this CPU has.");
  m.def(
      "gpus", gpus,
      "The GPUs that the CUDA library sees: index, name, capability, shared_bytes that a block can opt in to; and what "
      "kernels are chosen by after FLASHQ_CUDA_ARCH and FLASHQ_CUDA_SMEM: kernel_arch (90), kernel_shared_bytes, or a "
      "problem ('': none).");
  m.def("tbq4_codebook", tbq4_codebook, py::arg("head_dim"),
        "The 16 levels of a TBQ4 code, most negative first. Raises ValueError unless head_dim is 64, 128 or 256.");
  m.def("work_plan", work_plan, py::arg("begin"), py::arg("end"), py::arg("rows"), py::arg("kv_chunk") = 0,
        "How the CPU splits visible keys [begin, end) for `rows` rows (query tokens times group) of a KV head: "
        "(keys of a split, first split, number of splits). Boundaries are multiples of the split length from 0.");
}
