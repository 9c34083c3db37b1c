// The Python module flashq._C: facts about the build and the machine. No tensors; the ops are reached through torch.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <string>

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
  m.def("cpu_isa", &flashq_cpu_isa, "The ISA level that the CPU ops run at, or None if FLASHQ_CPU_ISA names none of this CPU's.");
  m.def("cpu_isa_levels", &flashq_cpu_isa_levels, "The levels that this CPU can run, slowest first, separated by ', '.");
  m.def(
      "set_cpu_isa",
      [](const std::string& name) {
        if (flashq_set_cpu_isa(name.c_str()) != 0)
          throw py::value_error("flashq: cpu isa: expected one of " + std::string(flashq_cpu_isa_levels()) + ", got " + name);
      },
      py::arg("name"), "Chooses the ISA level of the CPU ops from now on.");
}
