// Blocks of the codec as real functions, shared by quantize and append: one copy of the long inlined arithmetic an
// object, and a call boundary that IeeeScope needs.
#pragma once
#include <cstdio>

#include "core/tbq4/codec.h"
#include "cpu/kernels/rows.h"

namespace flashq::FLASHQ_ISA {
namespace {

// One row, x (head_dim) destroyed -> codes (head_dim / 2), norms (blocks).
template <int kWidth>
[[gnu::noinline]] void encode_row(float* x, int64_t head_dim, uint8_t* codes, uint16_t* norms) noexcept {
  for (int64_t n = 0; n < head_dim / kWidth; ++n)
    norms[n] = tbq4::encode_block<kWidth>(x + n * kWidth, codes + n * (kWidth / 2));
}
FLASHQ_HOST void encode_row(float* x, int64_t head_dim, uint8_t* codes, uint16_t* norms) {
  if (head_dim == 64) {
    encode_row<64>(x, head_dim, codes, norms);
  } else {
    encode_row<128>(x, head_dim, codes, norms);
  }
}

// Why FLASHQ_CHECK=1 refuses a row. Everything but kFinite would be written as poison.
enum Finding : uint32_t { kFinite = 0, kNonfiniteInput = 1, kNonfiniteOffset = 2, kTooLong = 4 };

template <int kWidth> [[gnu::noinline]] bool row_is_finite(const float* x, int64_t head_dim) noexcept {
  bool finite = true;
  for (int64_t n = 0; n < head_dim / kWidth; ++n) finite &= tbq4::is_finite(tbq4::energy_of<kWidth>(x + n * kWidth));
  return finite;
}
FLASHQ_HOST bool row_is_finite(const float* x, int64_t head_dim) {
  return head_dim == 64 ? row_is_finite<64>(x, head_dim) : row_is_finite<128>(x, head_dim);
}
FLASHQ_HOST bool elements_are_finite(const float* x, int64_t head_dim) {
  bool finite = true;
  for (int64_t i = 0; i < head_dim; ++i) finite &= tbq4::is_finite(x[i]);
  return finite;
}

FLASHQ_HOST Status refuse(const char* tensor, uint32_t findings) {
  Status status;
  const char* expected =
      findings & (kNonfiniteInput | kNonfiniteOffset) ? "finite values" : "blocks of norm below 2^64";
  const char* got = findings & (kNonfiniteInput | kNonfiniteOffset) ? "NaN or Inf" : "a larger one";
  if (!(findings & kNonfiniteInput) && findings & kNonfiniteOffset) tensor = "k_offsets";
  std::snprintf(status.message, sizeof status.message, "%s: expected %s (FLASHQ_CHECK=1), got %s", tensor, expected,
                got);
  return status;
}

}  // namespace
}  // namespace flashq::FLASHQ_ISA
