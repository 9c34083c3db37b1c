// What a device offers: a table of functions over Params structs. ops/ calls it, csrc/cpu and csrc/cuda fill one each.
#pragma once
#include "params.h"

namespace flashq {

// Why a call did not happen, or empty. A plain buffer, because it crosses the border of a library.
struct Status {
  char message[480] = {};  // without "flashq::op: ", which ops/ puts in front

  [[nodiscard]] bool ok() const { return message[0] == 0; }
};

// Where a call runs. CPU: `parallel` calls body(context, worker) once for every worker in [0, workers), concurrently
// where it can. CUDA: `stream` is a cudaStream_t of `device`, which is current; `check` has kernels report values out
// of range, and every call raise what earlier kernels reported.
struct Launch {
  int32_t workers = 1;
  void (*parallel)(int32_t workers, void (*body)(void* context, int32_t worker), void* context) = nullptr;
  int32_t device = -1;
  void* stream = nullptr;
  bool check = false;
};

// Null entries are ops that the backend does not have. Every function checks what only the device can know (an
// unsupported GPU, a launch error); arguments were checked by ops/.
struct Backend {
  int32_t abi;  // kBackendAbi of the library that filled the table

  int64_t (*attention_16_scratch_bytes)(const Attention16Params&, const Launch&);
  int64_t (*attention_tbq4_scratch_bytes)(const AttentionTbq4Params&, const Launch&);
  Status (*prefill)(const Attention16Params&, const Launch&);
  Status (*decode)(const Attention16Params&, const Launch&);
  Status (*tbq4_attention)(const AttentionTbq4Params&, const Launch&);
  Status (*kv_append)(const KvAppendParams&, const Launch&);
  Status (*tbq4_append)(const Tbq4AppendParams&, const Launch&);
  Status (*tbq4_rope_append)(const Tbq4RopeAppendParams&, const Launch&);
  Status (*tbq4_page_offsets)(const PageOffsetsParams&, const Launch&);
  Status (*tbq4_quantize)(const Tbq4QuantizeParams&, const Launch&);
  Status (*tbq4_dequantize)(const Tbq4DequantizeParams&, const Launch&);
  Status (*tbq4_rotate)(const Tbq4RotateParams&, const Launch&);
  Status (*merge_states)(const MergeParams&, const Launch&);

  const char* (*describe)();  // one line for `python -m flashq info`: arches, or ISA levels
};
inline constexpr int32_t kBackendAbi = 5;

[[nodiscard]] const Backend& cpu_backend();

}  // namespace flashq

extern "C" {
// Called by libflashq_cuda.so when it loads; defined in libflashq.so. Returns 0, or -1 when the two libraries are not
// of one build (then nothing is registered, and flashq says so).
__attribute__((visibility("default"))) int flashq_register_cuda_backend(const flashq::Backend* backend);
}
