// What the two appends to TBQ4 planes share: where a token goes, and one row of it encoded there.
#pragma once
#include "cpu/kernels/tbq4_blocks.h"

namespace flashq::FLASHQ_ISA {
namespace {

struct Place { int64_t page, slot; };
FLASHQ_HOST Place place_of(int64_t slot, int64_t page_size) { return {slot / page_size, slot % page_size}; }

enum class Plane { kKey, kValue };

// The offset vector of a key, or null.
FLASHQ_HOST const uint16_t* offset_at(const Tbq4AppendParams& p, Plane plane, int64_t page, int64_t head) {
  if (plane == Plane::kValue || !p.k_offsets) return nullptr;
  return p.k_offsets + page * p.k_offsets_stride[0] + head * p.k_offsets_stride[1];
}

// What the codec gets of a row: x, or key - offset, rounded once.
FLASHQ_HOST void subtract_offset(const uint16_t* offset, int64_t head_dim, float* x) {
  if (offset)
    for (int64_t i = 0; i < head_dim; ++i) x[i] = ieee::sub(x[i], half_to_float(offset[i]));
}

// x (head_dim), destroyed, into its plane.
template <Plane kPlane> FLASHQ_HOST void encode_at(const Tbq4AppendParams& p, Place at, int64_t head, float* x) {
  const AppendSource& s = p.source;
  const int64_t row = (at.page * s.kv_heads + head) * p.page_size + at.slot;
  subtract_offset(offset_at(p, kPlane, at.page, head), s.head_dim, x);
  encode_row(x, s.head_dim, (kPlane == Plane::kKey ? p.k_codes : p.v_codes) + row * (s.head_dim / 2),
             (kPlane == Plane::kKey ? p.k_norms : p.v_norms) + row * tbq4::blocks_per_row(s.head_dim));
}

// One head of one token of k or v, as it came.
template <Plane kPlane, class T>
FLASHQ_HOST const typename T::Storage* source_at(const AppendSource& s, int64_t token, int64_t head) {
  const int64_t* stride = kPlane == Plane::kKey ? s.k_stride : s.v_stride;
  return static_cast<const typename T::Storage*>(kPlane == Plane::kKey ? s.k : s.v) + token * stride[0] +
         head * stride[1];
}

// Tokens for about 50 us: half of encoding's time is K's, half V's.
FLASHQ_HOST int64_t least_tokens(const AppendSource& s) { return rows_of_50us(2 * s.kv_heads * s.head_dim * 4, 2000); }

}  // namespace
}  // namespace flashq::FLASHQ_ISA
