// Where the rows of 16- or 32-bit keys and values lie: dense, packed (varlen) or in pages of any size.
#pragma once
#include "cpu/attention/finish.h"

namespace flashq::FLASHQ_ISA {
namespace {

alignas(64) constexpr float kZeroRow[256] = {};  // stands for keys that nobody sees: what lies there is never read

// Offsets, in elements, of the keys of one sequence.
class KeyRows {
 public:
  FLASHQ_SIMD KeyRows(const KvView& kv, const Sequence& s) : kv_(kv), s_(s) {
    const int64_t n = kv.page_size;
    if (n > 0 && (n & (n - 1)) == 0) shift_ = __builtin_ctzll(static_cast<uint64_t>(n));
  }

  // Page and slot of a key. Reads the page table, so the key has to be visible.
  struct Place { int64_t page, slot; };
  FLASHQ_SIMD Place place(int64_t key) const {
    if (!kv_.block_table.given()) return {kv_.cu_seqlens_k.given() ? 0 : s_.batch, s_.k_begin + key};
    const int64_t entry = shift_ >= 0 ? key >> shift_ : key / kv_.page_size;
    return {kv_.block_table(s_.batch, entry), key - entry * kv_.page_size};
  }
  template <class T> FLASHQ_SIMD const T* value(int64_t kv_head, int64_t key) const {
    const Place at = place(key);
    return static_cast<const T*>(kv_.v) + at.page * kv_.v_stride[0] + at.slot * kv_.v_stride[1] +
           kv_head * kv_.v_stride[2];
  }

  // Rows of keys [first_key, first_key + 64) of a KV head; keys without a bit in `needed` get zero rows, and neither
  // their bytes nor their page table entries are touched.
  template <class T>
  FLASHQ_SIMD void locate(int64_t first_key, uint64_t needed, int64_t kv_head, const T* (&k)[kTileK],
                          const T* (&v)[kTileK]) const {
    const T* k0 = static_cast<const T*>(kv_.k) + kv_head * kv_.k_stride[2];
    const T* v0 = static_cast<const T*>(kv_.v) + kv_head * kv_.v_stride[2];
    const int64_t page_end = kv_.block_table.given() ? kv_.page_size : INT64_MAX;
    Place at{0, page_end};  // forces a look-up
    for (int i = 0; i < kTileK; ++i, ++at.slot) {
      if (!(needed >> i & 1)) {
        k[i] = v[i] = reinterpret_cast<const T*>(kZeroRow);
        at.slot = page_end - 1;
        continue;
      }
      if (at.slot >= page_end) at = place(first_key + i);
      k[i] = k0 + at.page * kv_.k_stride[0] + at.slot * kv_.k_stride[1];
      v[i] = v0 + at.page * kv_.v_stride[0] + at.slot * kv_.v_stride[1];
    }
  }

 private:
  const KvView& kv_;
  const Sequence& s_;
  int shift_ = -1;  // page_size is 2^shift, or -1: 64-bit divisions cost a tenth of a decode step on small pages
};

}  // namespace
}  // namespace flashq::FLASHQ_ISA
