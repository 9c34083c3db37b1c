// The Python module flashq._C: facts about the build and the machine. No tensors; the ops are reached through torch.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "exports.h"

namespace py = pybind11;

namespace {

py::dict build_info() {
  py::dict info;
  info["version"] = flashq_version();
  info["compiler"] = flashq_compiler();
  info["torch"] = flashq_built_torch();
  info["cuda_archs"] = flashq_cuda_archs();
  return info;
}

}  // namespace

PYBIND11_MODULE(_C, m) {
  m.doc() = "Facts about flashq's build and this machine.";
  m.def("build_info", &build_info,
        "The version, the compiler, the torch built against, and the CUDA architectures ('' without CUDA), as texts.");
}
