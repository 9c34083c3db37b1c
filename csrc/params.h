// What ops/ hands to a backend: pointers, strides in elements (int64), sizes and options. No tensors.
#pragma once
#include "core/portability.h"

namespace flashq {

enum class Dtype : int32_t { kFloat32, kFloat16, kBfloat16 };
FLASHQ_HD constexpr int64_t size_of(Dtype dtype) { return dtype == Dtype::kFloat32 ? 4 : 2; }  // bytes

// An int32 or int64 index tensor of one or two dimensions, or absent (data == nullptr).
struct IndexView {
  const void* data = nullptr;
  int64_t stride[2] = {0, 0};
  bool is_int64 = false;

  FLASHQ_HD bool given() const { return data != nullptr; }
  FLASHQ_HD int64_t operator()(int64_t i, int64_t j = 0) const {
    const int64_t at = i * stride[0] + j * stride[1];
    return is_int64 ? static_cast<const int64_t*>(data)[at] : static_cast<const int32_t*>(data)[at];
  }
};

// Tokens of so many pages. Tables and caches of zero strides can name more than there are numbers: then 2^62, beyond
// any length and far from overflow.
FLASHQ_HD int64_t capacity_of(int64_t pages, int64_t page_size) {
  constexpr int64_t kMost = int64_t{1} << 62;
  return page_size > 0 && pages > kMost / page_size ? kMost : pages * page_size;
}

// q, out and lse of an attention op. Token t of sequence b is at batch * b + token * t; with cu_seqlens_q the batch
// stride is 0 and t counts packed tokens.
struct QueryView {
  const void* q;
  void* out;
  float* lse;
  int64_t q_stride[3], out_stride[3];  // batch, token, head; last dim contiguous
  int64_t lse_stride[3];               // batch, head, token
  Dtype dtype, out_dtype;
  int64_t batch, q_len, q_heads, kv_heads, head_dim;  // q_len: queries of every sequence, unless packed
  int64_t total_tokens;                               // batch * q_len, or the packed tokens
  IndexView cu_seqlens_q;                             // (batch + 1), or absent

  FLASHQ_HD bool empty() const { return total_tokens == 0 || q_heads == 0; }
};

struct ScoreOptions {
  float scale, softcap;  // softcap 0: off
  bool causal;
  int64_t window_left, window_right;  // -1: unlimited
  const float* sinks;                 // (q_heads), or null
  int64_t sinks_stride;
};

// Keys and values in 16 or 32 bits: a paged cache (pages, page_size, kv_heads, head_dim). prefill is the case of one
// page a sequence; prefill_varlen of one page, where cu_seqlens_k says where each sequence starts.
struct KvView {
  const void *k, *v;
  int64_t k_stride[3], v_stride[3];  // page, slot, head
  int64_t num_pages, page_size;
  IndexView block_table;  // (batch, max_pages); absent: sequence b is page b
  int64_t max_pages;
  IndexView cu_seqlens_k;  // (batch + 1), or absent

  // Whether the table has a page for this token: exact pools hold only some.
  FLASHQ_HD bool holds(int64_t sequence, int64_t token) const {
    if (page_size == 0 || token / page_size >= max_pages) return false;
    const int64_t page = block_table(sequence, token / page_size);
    return page >= 0 && page < num_pages;
  }
};

// Keys and values in TBQ4: codes (pages, kv_heads, page_size, head_dim / 2), norms fp16 (..., head_dim / block).
struct Tbq4View {
  const uint8_t *k_codes, *v_codes;
  const uint16_t *k_norms, *v_norms;
  int64_t num_pages, page_size;
  IndexView block_table;
  int64_t max_pages;
  const uint16_t* k_offsets;    // fp16 (pages, kv_heads, head_dim), or null
  int64_t k_offsets_stride[2];  // page, head
  KvView exact;                 // the exact pool in q's dtype, its own table; exact.k null: none
  int64_t exact_first, exact_last;
};

// Tokens that a sequence of a cache has room for, of a KvView or a Tbq4View.
template <class Cache> FLASHQ_HD int64_t kv_capacity(const Cache& kv) {
  return kv.block_table.given() ? capacity_of(kv.max_pages, kv.page_size) : kv.page_size;
}

struct AttentionParams {
  QueryView query;
  ScoreOptions score;
  IndexView seqlens, kv_start;  // (batch); prefill ops have neither: a length is page_size or cu_seqlens_k's
  int64_t kv_chunk;             // split length, 0: automatic
  void* scratch;                // Backend::attention_scratch_bytes, 64-byte aligned
};
struct Attention16Params : AttentionParams { KvView kv; };
struct AttentionTbq4Params : AttentionParams { Tbq4View kv; };

// k, v (tokens, kv_heads, head_dim) into the slots of a cache.
struct AppendSource {
  const void *k, *v;
  int64_t k_stride[2], v_stride[2];  // token, head
  Dtype dtype;
  int64_t tokens, kv_heads, head_dim;
  IndexView slots;  // (tokens): page * page_size + offset, negative: skip
};
struct KvAppendParams {
  AppendSource source;
  void *k_cache, *v_cache;
  int64_t k_stride[3], v_stride[3];  // page, slot, head
  int64_t num_pages, page_size;
};
struct Tbq4AppendParams {
  AppendSource source;
  uint8_t *k_codes, *v_codes;
  uint16_t *k_norms, *v_norms;
  int64_t num_pages, page_size;
  const uint16_t* k_offsets;  // as Tbq4View
  int64_t k_offsets_stride[2];
  bool reject_nonfinite;  // FLASHQ_CHECK=1 on the CPU
};

// Rotary embedding by tables (max_position, pairs): of every row 2 * pairs elements turn, position by position.
struct RotaryTables {
  const void *cos, *sin;
  int64_t cos_stride, sin_stride;  // position
  Dtype dtype;
  int64_t max_position, pairs;
  bool interleaved;  // element 2 i turns with 2 i + 1, otherwise i with i + pairs
};
// Where some tokens are kept as they are: a paged cache (num_pages, page_size, kv_heads, head_dim). No slots: nowhere.
struct ExactPool {
  void *k, *v;
  int64_t k_stride[3], v_stride[3];  // page, slot, head
  int64_t num_pages, page_size;
  IndexView slots;  // as AppendSource
};
// An append whose keys turn first, and queries (tokens, q_heads, head_dim) that turn with them.
struct Tbq4RopeAppendParams : Tbq4AppendParams {
  const void* q;
  void* q_out;          // contiguous, the source's dtype
  int64_t q_stride[2];  // token, head
  int64_t q_heads;
  RotaryTables rotary;
  IndexView positions;  // (tokens)
  ExactPool exact;
};

// The keys that an append brings, and what they followed: k (tokens, kv_heads, head_dim), cut by cu_seqlens.
struct PageOffsetsParams {
  const void* k;
  int64_t k_stride[2];  // token, head
  Dtype dtype;
  int64_t tokens, batch, kv_heads, head_dim;
  IndexView cu_seqlens;         // (batch + 1)
  IndexView seqlens, kv_start;  // (batch); lengths with the append
  const uint8_t* k_codes;       // as Tbq4View
  const uint16_t* k_norms;
  int64_t num_pages, page_size;
  IndexView block_table;
  int64_t max_pages;
  KvView exact;         // keys only, in k's dtype; exact.k null: none
  uint16_t* k_offsets;  // written
  int64_t k_offsets_stride[2];
};

// A tensor of rows with up to kMaxLeading leading dimensions of any stride and a contiguous last one.
inline constexpr int kMaxLeading = 8;
struct RowsView {
  const void* data;
  int32_t leading;
  int64_t size[kMaxLeading], stride[kMaxLeading];
  Dtype dtype;
  int64_t rows, head_dim;
};
struct Tbq4QuantizeParams {
  RowsView x;
  uint8_t* codes;  // contiguous
  uint16_t* norms;
  bool reject_nonfinite;
};
struct Tbq4DequantizeParams {
  RowsView codes, norms;  // dtype unused; head_dim of the decoded row
  void* out;              // contiguous
  Dtype out_dtype;
};
struct Tbq4RotateParams {
  RowsView x;
  void* out;  // contiguous, x's dtype
  bool inverse;
};

struct MergeParams {
  const void* outs;   // (partials, batch, tokens, heads, head_dim)
  const float* lses;  // (partials, batch, heads, tokens)
  int64_t outs_stride[4], lses_stride[4];
  Dtype dtype;
  int64_t partials, batch, tokens, heads, head_dim;
  void* out;   // contiguous (batch, tokens, heads, head_dim)
  float* lse;  // contiguous (batch, heads, tokens)
};

}  // namespace flashq
