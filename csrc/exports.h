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

// The ISA level of the CPU backend ("portable", "avx2", "avx512"); null where FLASHQ_CPU_ISA names none that this CPU
// has.
FLASHQ_EXPORT const char* flashq_cpu_isa();
// The levels that this CPU can run, slowest first, separated by ", ".
FLASHQ_EXPORT const char* flashq_cpu_isa_levels();
// Chooses a level from now on, for tests. Returns 0, or -1 where this CPU has no such level; then nothing changes. No
// op may be running: it asks for scratch and uses it in two steps, and levels need different sizes.
FLASHQ_EXPORT int flashq_set_cpu_isa(const char* name);
