// The Python module flashq._C: facts about the build and the machine. No tensors; the ops are reached through torch.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <string>

namespace py = pybind11;

namespace {

#if defined(__clang__)
constexpr const char* kCompiler = "clang " __clang_version__;
#else
constexpr const char* kCompiler = "g++ " __VERSION__;
#endif

py::dict build_info() {
  py::dict info;
  info["version"] = FLASHQ_VERSION;
  info["compiler"] = kCompiler;
  info["torch"] = FLASHQ_TORCH_VERSION;
  info["cuda_archs"] = FLASHQ_CUDA_ARCHS;
  return info;
}

}  // namespace

PYBIND11_MODULE(_C, m) {
  m.doc() = "Facts about flashq's build and this machine.";
  m.def("build_info", &build_info,
        "The version, the compiler, the torch built against, and the CUDA architectures ('' without CUDA), as texts.");
}
