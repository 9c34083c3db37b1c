// Which keys fix a page's offset, once for every device (docs/contract.md, tbq4_page_offsets_).
#pragma once
#include "core/half.h"
#include "core/mask.h"

namespace flashq::tbq4 {

inline constexpr int64_t kOffsetWindow = 64;  // keys before a page that its offset may average

// One append of a sequence: keys [start, length) are new, keys before kv_start do not count.
struct OffsetRule {
  int64_t start, length, kv_start, page_size;

  // The page's first key that counts. The page is opened by the append that brings it.
  FLASHQ_HD int64_t opening(int64_t page) const { return max_of(page * page_size, kv_start); }
  // The pages that this append opens. page_of(token): token / page_size.
  template <class PageOf> FLASHQ_HD KeyRange opened_pages(const PageOf& page_of) const {
    if (max_of(start, kv_start) >= length) return {0, 0};
    return {page_of(start <= kv_start ? kv_start : start + page_size - 1), page_of(length - 1) + 1};
  }
  FLASHQ_HD KeyRange opened_pages() const {
    return opened_pages([this](int64_t token) { return token / page_size; });
  }
  FLASHQ_HD bool fills(int64_t page) const { return length >= (page + 1) * page_size; }
  // The page's own keys, all of this append, and the keys before it.
  FLASHQ_HD KeyRange own(int64_t page) const { return {opening(page), min_of((page + 1) * page_size, length)}; }
  FLASHQ_HD KeyRange before(int64_t page) const {
    return {max_of(kv_start, opening(page) - kOffsetWindow), opening(page)};
  }
};

// A mean of finite numbers, in the order they come: NaN and Inf in a key stay in that key.
struct OffsetMean {
  float sum = 0;
  int32_t count = 0;

  FLASHQ_HD void add(float x) {
    const bool counts = (bits_of(x) & 0x7f800000) != 0x7f800000;
    sum = ieee::add(sum, counts ? x : 0.0f);
    count += counts ? 1 : 0;
  }
  // fp16, clamped to its range; 0 of nothing.
  [[nodiscard]] FLASHQ_HD uint16_t value() const {
    const float mean = count > 0 ? ieee::div(sum, static_cast<float>(count)) : 0.0f;
    return float_to_half(mean > kLargest ? kLargest : mean < -kLargest ? -kLargest : mean);
  }

 private:
  static constexpr float kLargest = 65504.0f;
};

}  // namespace flashq::tbq4
