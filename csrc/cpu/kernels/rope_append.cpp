// tbq4_rope_append_: queries and keys turned, keys and values quantized into their slots and, where asked for, kept as
// they are.
#include "core/rope.h"
#include "cpu/kernels/append_rows.h"

namespace flashq::FLASHQ_ISA {
namespace {

struct Angles { float cos[kMaxHeadDim / 2], sin[kMaxHeadDim / 2]; };

template <class T> FLASHQ_HOST void load_angles(const RotaryTables& r, int64_t position, Angles& angles) {
  using Storage = typename T::Storage;
  load_row<T>(static_cast<const Storage*>(r.cos) + position * r.cos_stride, r.pairs, angles.cos);
  load_row<T>(static_cast<const Storage*>(r.sin) + position * r.sin_stride, r.pairs, angles.sin);
}
// Tables are fp32 or in T, the dtype of q, k and v.
template <class T>
[[gnu::noinline]] void load_angles(const Tbq4RopeAppendParams& p, int64_t token, Angles& angles) noexcept {
  const RotaryTables& r = p.rotary;
  if (r.dtype == Dtype::kFloat32)
    load_angles<Float32>(r, p.positions(token), angles);
  else
    load_angles<T>(r, p.positions(token), angles);
}

// Pairs of `distance` elements, `step` apart.
template <int kStep> FLASHQ_HOST void turn_pairs(const Angles& angles, int64_t pairs, int64_t distance, float* x) {
  for (int64_t i = 0; i < pairs; ++i) {
    const float a = x[kStep * i], b = x[kStep * i + distance];
    x[kStep * i] = rope::first_of(a, b, angles.cos[i], angles.sin[i]);
    x[kStep * i + distance] = rope::second_of(a, b, angles.cos[i], angles.sin[i]);
  }
}

// One row of q or k: turned in fp32, then rounded to T, as if another op had stored it.
template <class T> [[gnu::noinline]] void load_turned(const Tbq4RopeAppendParams& p, const typename T::Storage* from,
                                                      const Angles& angles, float* x) noexcept {
  const int64_t head_dim = p.source.head_dim;
  load_row<T>(from, head_dim, x);
  if (p.rotary.interleaved)
    turn_pairs<2>(angles, p.rotary.pairs, 1, x);
  else
    turn_pairs<1>(angles, p.rotary.pairs, p.rotary.pairs, x);
  for (int64_t i = 0; i < head_dim; ++i) x[i] = T::load(T::store(x[i]));
}

template <class T> FLASHQ_HOST typename T::Storage* exact_at(const ExactPool& pool, Plane plane, Place at,
                                                             int64_t head) {
  const int64_t* stride = plane == Plane::kKey ? pool.k_stride : pool.v_stride;
  return static_cast<typename T::Storage*>(plane == Plane::kKey ? pool.k : pool.v) + at.page * stride[0] +
         at.slot * stride[1] + head * stride[2];
}

template <class T>
FLASHQ_HOST void append_token(const Tbq4RopeAppendParams& p, int64_t token, const Angles& angles, float* x) {
  const AppendSource& s = p.source;
  const int64_t slot = s.slots(token), exact_slot = p.exact.slots.given() ? p.exact.slots(token) : -1;
  const Place at = slot < 0 ? Place{} : place_of(slot, p.page_size);
  const Place exact = exact_slot < 0 ? Place{} : place_of(exact_slot, p.exact.page_size);
  if (slot < 0 && exact_slot < 0) return;
  for (int64_t h = 0; h < s.kv_heads; ++h) {
    load_turned<T>(p, source_at<Plane::kKey, T>(s, token, h), angles, x);
    if (exact_slot >= 0) store_row<T>(x, s.head_dim, exact_at<T>(p.exact, Plane::kKey, exact, h));
    if (slot >= 0) encode_at<Plane::kKey>(p, at, h, x);
  }
  for (int64_t h = 0; h < s.kv_heads; ++h) {
    const auto* value = source_at<Plane::kValue, T>(s, token, h);
    if (exact_slot >= 0) std::memcpy(exact_at<T>(p.exact, Plane::kValue, exact, h), value, s.head_dim * sizeof *value);
    if (slot < 0) continue;
    load_row<T>(value, s.head_dim, x);
    encode_at<Plane::kValue>(p, at, h, x);
  }
}

template <class T>
[[gnu::noinline]] void process_tokens(const Tbq4RopeAppendParams& p, int64_t begin, int64_t end) noexcept {
  using Storage = typename T::Storage;
  const int64_t head_dim = p.source.head_dim;
  Angles angles;
  float x[kMaxHeadDim];
  for (int64_t token = begin; token < end; ++token) {
    load_angles<T>(p, token, angles);
    for (int64_t h = 0; h < p.q_heads; ++h) {
      load_turned<T>(p, static_cast<const Storage*>(p.q) + token * p.q_stride[0] + h * p.q_stride[1], angles, x);
      store_row<T>(x, head_dim, static_cast<Storage*>(p.q_out) + (token * p.q_heads + h) * head_dim);
    }
    append_token<T>(p, token, angles, x);
  }
}

// What FLASHQ_CHECK=1 refuses, by where it began.
enum Cause : uint32_t {
  kNone = 0,
  kKey = 1,
  kTable = 2,
  kTurnedKey = 4,
  kOffset = 8,
  kLongKey = 16,
  kValue = 32,
  kLongValue = 64,
};

// Why a turned key, less its offset, is not finite, or its length.
template <class T> FLASHQ_HOST Cause find_cause(const Tbq4RopeAppendParams& p, const typename T::Storage* key,
                                                const Angles& angles, const uint16_t* offset, float* x) {
  const int64_t head_dim = p.source.head_dim;
  load_row<T>(key, head_dim, x);
  if (!elements_are_finite(x, head_dim)) return kKey;
  const int64_t pairs = p.rotary.pairs;
  if (!elements_are_finite(angles.cos, pairs) || !elements_are_finite(angles.sin, pairs)) return kTable;
  load_turned<T>(p, key, angles, x);
  if (!elements_are_finite(x, head_dim)) return kTurnedKey;
  if (!offset) return kLongKey;
  load_row<Float16>(offset, head_dim, x);
  return elements_are_finite(x, head_dim) ? kLongKey : kOffset;
}

template <class T>
[[gnu::noinline]] uint32_t inspect_tokens(const Tbq4RopeAppendParams& p, int64_t begin, int64_t end) noexcept {
  const AppendSource& s = p.source;
  uint32_t found = kNone;
  Angles angles;
  float x[kMaxHeadDim];
  for (int64_t token = begin; token < end; ++token) {
    const int64_t slot = s.slots(token);
    if (slot < 0) continue;
    load_angles<T>(p, token, angles);
    for (int64_t h = 0; h < s.kv_heads; ++h) {
      const auto* key = source_at<Plane::kKey, T>(s, token, h);
      const uint16_t* offset = offset_at(p, Plane::kKey, place_of(slot, p.page_size).page, h);
      load_turned<T>(p, key, angles, x);
      subtract_offset(offset, s.head_dim, x);
      if (!row_is_finite(x, s.head_dim)) found |= find_cause<T>(p, key, angles, offset, x);
      load_row<T>(source_at<Plane::kValue, T>(s, token, h), s.head_dim, x);
      if (!row_is_finite(x, s.head_dim)) found |= elements_are_finite(x, s.head_dim) ? kLongValue : kValue;
    }
  }
  return found;
}

Status refuse_nonfinite(uint32_t found) {
  Status status;
  const auto say = [&](const char* tensor, const char* expected, const char* got) {
    std::snprintf(status.message, sizeof status.message, "%s: expected %s (FLASHQ_CHECK=1), got %s", tensor, expected,
                  got);
    return status;
  };
  if (found & kKey) return say("k", "finite values", "NaN or Inf");
  if (found & kTable) return say("cos, sin", "finite values", "NaN or Inf");
  if (found & kTurnedKey) return say("k", "finite values once it is turned", "Inf");
  if (found & kOffset) return say("k_offsets", "finite values", "NaN or Inf");
  if (found & kLongKey) return say("k", "blocks of norm below 2^64", "a larger one");
  if (found & kValue) return say("v", "finite values", "NaN or Inf");
  return say("v", "blocks of norm below 2^64", "a larger one");
}

}  // namespace

Status tbq4_rope_append(const Tbq4RopeAppendParams& p, const Launch& launch) {
  const int64_t least = least_tokens(p.source);
  if (p.reject_nonfinite) {  // before anything is written
    uint32_t found = kNone;
    for_ranges(launch, p.source.tokens, least, [&](int64_t begin, int64_t end) noexcept {
      const IeeeScope scope;
      const uint32_t here =
          with_dtype(p.source.dtype, [&](auto t) noexcept { return inspect_tokens<decltype(t)>(p, begin, end); });
      __atomic_fetch_or(&found, here, __ATOMIC_RELAXED);
    });
    if (found != kNone) return refuse_nonfinite(found);
  }
  for_ranges(launch, p.source.tokens, least, [&](int64_t begin, int64_t end) noexcept {
    const IeeeScope scope;
    with_dtype(p.source.dtype, [&](auto t) noexcept { process_tokens<decltype(t)>(p, begin, end); });
  });
  return {};
}

}  // namespace flashq::FLASHQ_ISA
