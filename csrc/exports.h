// The C symbols of libflashq.so that flashq._C and Python's ctypes reach; the ops are reached through torch.
#pragma once

#define FLASHQ_EXPORT extern "C" __attribute__((visibility("default")))

// The version of the package that the library was built for. The loader refuses another one.
FLASHQ_EXPORT const char* flashq_version();
