// The C symbols of libflashq.so that flashq._C and Python's ctypes reach; the ops are reached through torch.
#pragma once

#define FLASHQ_EXPORT extern "C" __attribute__((visibility("default")))

// The version of the package that the library was built for. The loader refuses another one.
FLASHQ_EXPORT const char* flashq_version();
FLASHQ_EXPORT const char* flashq_compiler();
FLASHQ_EXPORT const char* flashq_built_torch();  // the version of the torch whose headers were used
FLASHQ_EXPORT const char* flashq_cuda_archs();   // "8.0+PTX;9.0a"; empty: built without CUDA

// Backend::describe of a device; null where there is no such backend, as before libflashq_cuda.so registered its own.
FLASHQ_EXPORT const char* flashq_describe_backend(bool cuda);
