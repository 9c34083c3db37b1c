// Chooses the ISA level once (FLASHQ_CPU_ISA overrides it) and fills the backend's table.
#include "cpu/dispatch.h"

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>

#include "exports.h"

namespace flashq::cpu {
namespace {

// __builtin_cpu_supports also asks XCR0 whether the OS saves the registers.
const Level kLevels[] = {
    {"portable", &portable::kernels, [] { return true; }},
#if defined(__x86_64__)
    {"avx2", &avx2::kernels,
     [] {
       return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c") &&
              __builtin_cpu_supports("bmi2");
     }},
    {"avx512", &avx512::kernels,
     [] {
       return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
              __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
              __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512bf16") &&
              __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c") &&
              __builtin_cpu_supports("bmi2");
     }},
#endif
};

const Level* find(const char* name) {
  for (const Level& level : kLevels)
    if (std::strcmp(level.name, name) == 0 && level.supported()) return &level;
  return nullptr;
}

// What the environment asks for, read once.
const std::string& wish() {
  static const std::string text = [] {
    const char* value = std::getenv("FLASHQ_CPU_ISA");
    return std::string(value ? value : "");
  }();
  return text;
}

// Null: the environment names no level that this CPU has.
std::atomic<const Level*>& current() {
  static std::atomic<const Level*> level = [] {
    if (!wish().empty()) return find(wish().c_str());
    const Level* best = nullptr;
    for (const Level& each : kLevels)
      if (each.supported()) best = &each;
    return best;
  }();
  return level;
}

// "portable, avx2": what this CPU can run, slowest first.
const std::string& level_names() {
  static const std::string names = [] {
    std::string text;
    for (const Level& level : kLevels)
      if (level.supported()) text += (text.empty() ? "" : ", ") + std::string(level.name);
    return text;
  }();
  return names;
}

template <auto kBytes, class Params> int64_t scratch_bytes(const Params& p, const Launch& launch) {
  Status status;
  const Level* level = current_level(status);
  return level ? (level->kernels->*kBytes)(p, launch.workers) : 0;
}
template <auto kEntry, class Params> Status run(const Params& p, const Launch& launch) {
  Status status;
  const Level* level = current_level(status);
  return level ? (level->kernels->*kEntry)(p, launch) : status;
}

const char* describe() {
  static thread_local std::string text;
  Status status;
  const Level* level = current_level(status);
  text = level ? std::string(level->name) + " (this CPU has: " + level_names() + ")" : status.message;
  return text.c_str();
}

}  // namespace

const Level* current_level(Status& status) {
  const Level* level = current().load(std::memory_order_relaxed);
  if (!level)
    std::snprintf(status.message, sizeof status.message, "FLASHQ_CPU_ISA: expected one of %s, got %.100s",
                  level_names().c_str(), wish().c_str());
  return level;
}

}  // namespace flashq::cpu

const flashq::Backend& flashq::cpu_backend() {
  using cpu::Kernels;
  static const Backend backend = [] {
    Backend b{};
    b.abi = kBackendAbi;
    b.attention_16_scratch_bytes = cpu::scratch_bytes<&Kernels::attention_16_scratch_bytes, Attention16Params>;
    b.prefill = cpu::run<&Kernels::attention_16, Attention16Params>;
    b.decode = cpu::run<&Kernels::attention_16, Attention16Params>;
    b.attention_tbq4_scratch_bytes = cpu::scratch_bytes<&Kernels::tbq4_attention_scratch_bytes, AttentionTbq4Params>;
    b.tbq4_attention = cpu::run<&Kernels::tbq4_attention, AttentionTbq4Params>;
    b.kv_append = cpu::run<&Kernels::kv_append, KvAppendParams>;
    b.tbq4_append = cpu::run<&Kernels::tbq4_append, Tbq4AppendParams>;
    b.tbq4_rope_append = cpu::run<&Kernels::tbq4_rope_append, Tbq4RopeAppendParams>;
    b.tbq4_page_offsets = cpu::run<&Kernels::tbq4_page_offsets, PageOffsetsParams>;
    b.tbq4_quantize = cpu::run<&Kernels::tbq4_quantize, Tbq4QuantizeParams>;
    b.tbq4_dequantize = cpu::run<&Kernels::tbq4_dequantize, Tbq4DequantizeParams>;
    b.tbq4_rotate = cpu::run<&Kernels::tbq4_rotate, Tbq4RotateParams>;
    b.merge_states = cpu::run<&Kernels::merge_states, MergeParams>;
    b.describe = cpu::describe;
    return b;
  }();
  return backend;
}

int flashq_set_cpu_isa(const char* name) {
  const flashq::cpu::Level* level = flashq::cpu::find(name);
  if (!level) return -1;
  flashq::cpu::current().store(level, std::memory_order_relaxed);
  return 0;
}

const char* flashq_cpu_isa() {
  const flashq::cpu::Level* level = flashq::cpu::current().load(std::memory_order_relaxed);
  return level ? level->name : nullptr;
}

const char* flashq_cpu_isa_levels() { return flashq::cpu::level_names().c_str(); }
