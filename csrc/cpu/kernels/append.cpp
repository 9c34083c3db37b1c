// kv_append_ and tbq4_append_: new tokens into the slots of a paged cache.
#include "cpu/kernels/append_rows.h"

namespace flashq::FLASHQ_ISA {
namespace {

void copy_tokens(const KvAppendParams& p, int64_t begin, int64_t end) {
  const AppendSource& s = p.source;
  const int64_t bytes = size_of(s.dtype), row_bytes = s.head_dim * bytes;
  const auto copy_token = [&](const void* from, const int64_t* from_stride, void* to, const int64_t* to_stride,
                              int64_t token, Place at) {
    const char* source = static_cast<const char*>(from) + token * from_stride[0] * bytes;
    char* target = static_cast<char*>(to) + (at.page * to_stride[0] + at.slot * to_stride[1]) * bytes;
    for (int64_t h = 0; h < s.kv_heads; ++h)
      std::memcpy(target + h * to_stride[2] * bytes, source + h * from_stride[1] * bytes, row_bytes);
  };
  for (int64_t token = begin; token < end; ++token) {
    const int64_t slot = s.slots(token);
    if (slot < 0) continue;
    const Place at = place_of(slot, p.page_size);
    copy_token(s.k, s.k_stride, p.k_cache, p.k_stride, token, at);
    copy_token(s.v, s.v_stride, p.v_cache, p.v_stride, token, at);
  }
}

// What the codec gets for one head of one token.
template <Plane kPlane, class T>
FLASHQ_HOST void load_source(const Tbq4AppendParams& p, int64_t token, int64_t head, const uint16_t* offset, float* x) {
  load_row<T>(source_at<kPlane, T>(p.source, token, head), p.source.head_dim, x);
  subtract_offset(offset, p.source.head_dim, x);
}

template <Plane kPlane, class T>
[[gnu::noinline]] void encode_tokens(const Tbq4AppendParams& p, int64_t begin, int64_t end) noexcept {
  const AppendSource& s = p.source;
  float x[kMaxHeadDim];
  for (int64_t token = begin; token < end; ++token) {
    const int64_t slot = s.slots(token);
    if (slot < 0) continue;
    const Place at = place_of(slot, p.page_size);
    for (int64_t h = 0; h < s.kv_heads; ++h) {
      load_row<T>(source_at<kPlane, T>(s, token, h), s.head_dim, x);
      encode_at<kPlane>(p, at, h, x);
    }
  }
}

template <Plane kPlane, class T>
[[gnu::noinline]] uint32_t inspect_tokens(const Tbq4AppendParams& p, int64_t begin, int64_t end) noexcept {
  const AppendSource& s = p.source;
  uint32_t findings = kFinite;
  float x[kMaxHeadDim];
  for (int64_t token = begin; token < end; ++token) {
    const int64_t slot = s.slots(token);
    if (slot < 0) continue;
    for (int64_t h = 0; h < s.kv_heads; ++h) {
      const uint16_t* offset = offset_at(p, kPlane, place_of(slot, p.page_size).page, h);
      load_source<kPlane, T>(p, token, h, offset, x);
      if (row_is_finite(x, s.head_dim)) continue;
      load_source<kPlane, T>(p, token, h, nullptr, x);
      if (!elements_are_finite(x, s.head_dim)) {
        findings |= kNonfiniteInput;
        continue;
      }
      if (offset) load_row<Float16>(offset, s.head_dim, x);
      findings |= offset && !elements_are_finite(x, s.head_dim) ? kNonfiniteOffset : kTooLong;
    }
  }
  return findings;
}

template <Plane kPlane> uint32_t inspect(const Tbq4AppendParams& p, const Launch& launch) {
  uint32_t findings = kFinite;
  for_ranges(launch, p.source.tokens, least_tokens(p.source), [&](int64_t begin, int64_t end) noexcept {
    const IeeeScope scope;
    const uint32_t found =
        with_dtype(p.source.dtype, [&](auto t) noexcept { return inspect_tokens<kPlane, decltype(t)>(p, begin, end); });
    __atomic_fetch_or(&findings, found, __ATOMIC_RELAXED);
  });
  return findings;
}

}  // namespace

Status kv_append(const KvAppendParams& p, const Launch& launch) {
  if (p.source.head_dim == 0) return {};
  const int64_t least = rows_of_50us(2 * p.source.kv_heads * p.source.head_dim * size_of(p.source.dtype), 5000);
  for_ranges(launch, p.source.tokens, least, [&](int64_t begin, int64_t end) noexcept { copy_tokens(p, begin, end); });
  return {};
}

Status tbq4_append(const Tbq4AppendParams& p, const Launch& launch) {
  if (p.reject_nonfinite) {  // before anything is written
    if (const uint32_t findings = inspect<Plane::kKey>(p, launch)) return refuse("k", findings);
    if (const uint32_t findings = inspect<Plane::kValue>(p, launch)) return refuse("v", findings);
  }
  for_ranges(launch, p.source.tokens, least_tokens(p.source), [&](int64_t begin, int64_t end) noexcept {
    const IeeeScope scope;
    with_dtype(p.source.dtype, [&](auto t) noexcept {
      encode_tokens<Plane::kKey, decltype(t)>(p, begin, end);
      encode_tokens<Plane::kValue, decltype(t)>(p, begin, end);
    });
  });
  return {};
}

}  // namespace flashq::FLASHQ_ISA
