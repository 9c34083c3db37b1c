// The ISA level that the CPU backend runs at.
#pragma once
#include <cstdint>

#include "backend.h"
#include "cpu/kernels.h"

namespace flashq::cpu {

struct Level {
  const char* name;
  const Kernels* kernels;
  bool (*supported)();
};

// The level in use, or null where FLASHQ_CPU_ISA names none that this CPU has; then `status` says so.
[[nodiscard]] const Level* current_level(Status& status);

}  // namespace flashq::cpu
