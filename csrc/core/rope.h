// Rotary position embedding of one pair of elements, once for every device (docs/contract.md, tbq4_rope_append_).
//
// Su et al., RoFormer (arXiv:2104.09864), equation 34, in fp32: both products and their sum are rounded once each and
// never fused, so that every device quantizes the same numbers.
#pragma once
#include "core/ieee.h"

namespace flashq::rope {

// (a, b) turned by an angle: (a cos - b sin, b cos + a sin).
FLASHQ_HD float first_of(float a, float b, float cos, float sin) {
  return ieee::sub(ieee::mul(a, cos), ieee::mul(b, sin));
}
FLASHQ_HD float second_of(float a, float b, float cos, float sin) {
  return ieee::add(ieee::mul(b, cos), ieee::mul(a, sin));
}

}  // namespace flashq::rope
