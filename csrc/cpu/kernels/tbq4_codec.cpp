// tbq4_quantize and tbq4_dequantize: rows to codes and norms, and back.
#include "cpu/kernels/tbq4_blocks.h"

namespace flashq::FLASHQ_ISA {
namespace {

constexpr int64_t kEncodeBytesPerUs = 2000, kDecodeBytesPerUs = 4000;  // of fp32 values, one core with AVX2

template <class T>
[[gnu::noinline]] void quantize_rows(const Tbq4QuantizeParams& p, int64_t begin, int64_t end) noexcept {
  const int64_t dim = p.x.head_dim, blocks = tbq4::blocks_per_row(dim);
  RowCursor from(p.x, begin);
  float x[kMaxHeadDim];
  for (int64_t row = begin; row < end; ++row, from.next()) {
    load_row<T>(static_cast<const typename T::Storage*>(p.x.data) + from.offset(), dim, x);
    encode_row(x, dim, p.codes + row * (dim / 2), p.norms + row * blocks);
  }
}

template <class T>
[[gnu::noinline]] uint32_t inspect_rows(const Tbq4QuantizeParams& p, int64_t begin, int64_t end) noexcept {
  RowCursor from(p.x, begin);
  uint32_t findings = kFinite;
  float x[kMaxHeadDim];
  for (int64_t row = begin; row < end; ++row, from.next()) {
    load_row<T>(static_cast<const typename T::Storage*>(p.x.data) + from.offset(), p.x.head_dim, x);
    if (row_is_finite(x, p.x.head_dim)) continue;
    findings |= elements_are_finite(x, p.x.head_dim) ? kTooLong : kNonfiniteInput;
  }
  return findings;
}

template <int kWidth>
[[gnu::noinline]] void decode_row(const uint8_t* codes, const uint16_t* norms, int64_t head_dim, float* out) noexcept {
  for (int64_t n = 0; n < head_dim / kWidth; ++n)
    tbq4::decode_block<kWidth>(codes + n * (kWidth / 2), norms[n], out + n * kWidth);
}

template <class T>
[[gnu::noinline]] void dequantize_rows(const Tbq4DequantizeParams& p, int64_t begin, int64_t end) noexcept {
  const int64_t dim = p.codes.head_dim;
  RowCursor codes_at(p.codes, begin), norms_at(p.norms, begin);
  float x[kMaxHeadDim];
  for (int64_t row = begin; row < end; ++row, codes_at.next(), norms_at.next()) {
    const auto* codes = static_cast<const uint8_t*>(p.codes.data) + codes_at.offset();
    const auto* norms = static_cast<const uint16_t*>(p.norms.data) + norms_at.offset();
    if (dim == 64) {
      decode_row<64>(codes, norms, dim, x);
    } else {
      decode_row<128>(codes, norms, dim, x);
    }
    store_row<T>(x, dim, static_cast<typename T::Storage*>(p.out) + row * dim);
  }
}

}  // namespace

Status tbq4_quantize(const Tbq4QuantizeParams& p, const Launch& launch) {
  const int64_t least = rows_of_50us(p.x.head_dim * 4, kEncodeBytesPerUs);
  if (p.reject_nonfinite) {
    uint32_t findings = kFinite;
    for_ranges(launch, p.x.rows, least, [&](int64_t begin, int64_t end) noexcept {
      const IeeeScope scope;
      const uint32_t found =
          with_dtype(p.x.dtype, [&](auto t) noexcept { return inspect_rows<decltype(t)>(p, begin, end); });
      __atomic_fetch_or(&findings, found, __ATOMIC_RELAXED);
    });
    if (findings != kFinite) return refuse("x", findings);
  }
  for_ranges(launch, p.x.rows, least, [&](int64_t begin, int64_t end) noexcept {
    const IeeeScope scope;
    with_dtype(p.x.dtype, [&](auto t) noexcept { quantize_rows<decltype(t)>(p, begin, end); });
  });
  return {};
}

Status tbq4_dequantize(const Tbq4DequantizeParams& p, const Launch& launch) {
  const int64_t least = rows_of_50us(p.codes.head_dim * 4, kDecodeBytesPerUs);
  for_ranges(launch, p.codes.rows, least, [&](int64_t begin, int64_t end) noexcept {
    const IeeeScope scope;
    with_dtype(p.out_dtype, [&](auto t) noexcept { dequantize_rows<decltype(t)>(p, begin, end); });
  });
  return {};
}

}  // namespace flashq::FLASHQ_ISA
