// What the appends take, checked: new keys and values, their slots, the planes they go to.
#pragma once
#include "ops/launch.h"
#include "ops/tbq4_planes.h"

namespace flashq {

// k and v (T, Hkv, D) of one dtype, and the slot of each token.
[[nodiscard]] AppendSource view_source(const Op& op, const Tensor& k, const Tensor& v, const Tensor& slots);

void view_tbq4_append(const Op& op, const Call& call, const Tensor& k, const Tensor& v, const PlaneTensors& planes,
                      const Tensor& slots, const OptionalTensor& k_offsets, Tbq4AppendParams& params);

}  // namespace flashq
