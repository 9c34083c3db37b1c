// tbq4_page_offsets_: the key offsets of the pages that an append opens.
#include "core/tbq4/page_offsets.h"

#include "cpu/kernels/tbq4_blocks.h"

namespace flashq::FLASHQ_ISA {
namespace {

tbq4::OffsetRule rule_of(const PageOffsetsParams& p, int64_t sequence) {
  const int64_t length = p.seqlens(sequence);
  return {length - (p.cu_seqlens(sequence + 1) - p.cu_seqlens(sequence)), length,
          p.kv_start.given() ? p.kv_start(sequence) : 0, p.page_size};
}

template <int kWidth>
[[gnu::noinline]] void decode_key(const uint8_t* codes, const uint16_t* norms, int64_t head_dim, float* x) noexcept {
  for (int64_t n = 0; n < head_dim / kWidth; ++n)
    tbq4::decode_block<kWidth>(codes + n * (kWidth / 2), norms[n], x + n * kWidth);
}

// One key of one head: from this append, else exact where it is held, else decoded. False where it is nowhere any more.
template <class T>
bool load_key(const PageOffsetsParams& p, int64_t sequence, int64_t start, int64_t head, int64_t token, float* x) {
  using Storage = typename T::Storage;
  if (token >= start) {
    const int64_t row = p.cu_seqlens(sequence) + token - start;
    load_row<T>(static_cast<const Storage*>(p.k) + row * p.k_stride[0] + head * p.k_stride[1], p.head_dim, x);
    return true;
  }
  if (p.exact.k && p.exact.holds(sequence, token)) {
    const KvView& pool = p.exact;
    const int64_t page = pool.block_table(sequence, token / pool.page_size);
    const int64_t at = page * pool.k_stride[0] + token % pool.page_size * pool.k_stride[1] + head * pool.k_stride[2];
    load_row<T>(static_cast<const Storage*>(pool.k) + at, p.head_dim, x);
    return true;
  }
  const int64_t page = p.block_table(sequence, token / p.page_size);
  if (page < 0 || page >= p.num_pages) return false;
  const int64_t row = (page * p.kv_heads + head) * p.page_size + token % p.page_size;
  const uint8_t* codes = p.k_codes + row * (p.head_dim / 2);
  const uint16_t* norms = p.k_norms + row * tbq4::blocks_per_row(p.head_dim);
  if (p.head_dim == 64)
    decode_key<64>(codes, norms, p.head_dim, x);
  else
    decode_key<128>(codes, norms, p.head_dim, x);
  const uint16_t* offset = p.k_offsets + page * p.k_offsets_stride[0] + head * p.k_offsets_stride[1];
  for (int64_t i = 0; i < p.head_dim; ++i) x[i] = ieee::add(x[i], half_to_float(offset[i]));
  return true;
}

template <class T>
void fix_offset(const PageOffsetsParams& p, int64_t sequence, const tbq4::OffsetRule& rule, int64_t page,
                int64_t head) {
  tbq4::OffsetMean mean[kMaxHeadDim];
  float x[kMaxHeadDim];
  const auto add_keys = [&](KeyRange keys) {
    bool any = false;
    for (int64_t token = keys.begin; token < keys.end; ++token) {
      if (!load_key<T>(p, sequence, rule.start, head, token, x)) continue;
      any = true;
      for (int64_t i = 0; i < p.head_dim; ++i) mean[i].add(x[i]);
    }
    return any;
  };
  if (rule.fills(page) || !add_keys(rule.before(page))) add_keys(rule.own(page));
  uint16_t* offset = p.k_offsets + p.block_table(sequence, page) * p.k_offsets_stride[0] + head * p.k_offsets_stride[1];
  for (int64_t i = 0; i < p.head_dim; ++i) offset[i] = mean[i].value();
}

// Items [begin, end) of all (opened page, head) pairs, sequence by sequence.
template <class T> [[gnu::noinline]] void fix_offsets(const PageOffsetsParams& p, int64_t begin, int64_t end) noexcept {
  int64_t item = 0;
  for (int64_t b = 0; b < p.batch && item < end; ++b) {
    const tbq4::OffsetRule rule = rule_of(p, b);
    const KeyRange pages = rule.opened_pages();
    const int64_t from = item;
    item += pages.size() * p.kv_heads;
    for (int64_t i = max_of(begin, from); i < min_of(end, item); ++i)
      fix_offset<T>(p, b, rule, pages.begin + (i - from) / p.kv_heads, (i - from) % p.kv_heads);
  }
}

}  // namespace

Status tbq4_page_offsets(const PageOffsetsParams& p, const Launch& launch) {
  int64_t items = 0;
  for (int64_t b = 0; b < p.batch; ++b) items += rule_of(p, b).opened_pages().size() * p.kv_heads;
  const int64_t least = rows_of_50us(p.page_size * p.head_dim * 4, 4000);
  for_ranges(launch, items, least, [&](int64_t begin, int64_t end) noexcept {
    const IeeeScope scope;
    with_dtype(p.dtype, [&](auto t) noexcept { fix_offsets<decltype(t)>(p, begin, end); });
  });
  return {};
}

}  // namespace flashq::FLASHQ_ISA
