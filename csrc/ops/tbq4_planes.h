// The planes of a TBQ4 cache and their page offsets, checked: what tbq4_attention reads and tbq4_append_ writes.
#pragma once
#include "ops/checks.h"

namespace flashq {

struct PlaneTensors { const Tensor &k_codes, &k_norms, &v_codes, &v_norms; };
struct Planes {
  const uint8_t *k_codes, *v_codes;
  const uint16_t *k_norms, *v_norms;
  int64_t pages, page_size;
};

// codes uint8 (P, Hkv, N, D / 2), norms fp16 (P, Hkv, N, D / block), all contiguous, on the other tensor's device.
[[nodiscard]] Planes view_planes(const Op& op, const PlaneTensors& t, int64_t head_dim, int64_t kv_heads,
                                 const char* other_name, const Tensor& other);
// fp16 (P, Hkv, D), unit last stride; null where absent.
[[nodiscard]] const uint16_t* view_offsets(const Op& op, const OptionalTensor& k_offsets, int64_t pages,
                                           int64_t kv_heads, int64_t head_dim, const char* other_name,
                                           const Tensor& other, int64_t (&stride)[2]);

}  // namespace flashq
