// What setup.py knows about the build. It alone depends on the versions, so that a new one recompiles no kernel.
#include "exports.h"

const char* flashq_version() { return FLASHQ_VERSION; }

const char* flashq_compiler() {
#if defined(__clang__)
  return "clang " __clang_version__;
#else
  return "g++ " __VERSION__;
#endif
}

const char* flashq_built_torch() { return FLASHQ_TORCH_VERSION; }

const char* flashq_cuda_archs() { return FLASHQ_CUDA_ARCHS; }
