#include <algorithm>

#include "ops/append_args.h"
#include "ops/ops.h"

namespace flashq {
namespace {

RotaryTables view_tables(const Op& op, const Tensor& cos, const Tensor& sin, const Tensor& q, bool interleaved) {
  const int64_t head_dim = q.size(2);
  expect_dtype(op, "cos", cos, {ScalarType::Float, q.scalar_type()});
  expect_same_dtype(op, "sin", sin, "cos", cos);
  expect_shape(op, "cos", cos, {{"max_position"}, {"rotary_dim / 2"}});
  expect_shape(op, "sin", sin, {{"max_position", cos.size(0)}, {"rotary_dim / 2", cos.size(1)}});
  if (cos.size(1) < 1 || cos.size(1) > head_dim / 2)
    op.refuse("cos", "from 1 to " + std::to_string(head_dim / 2) + " columns, half of what turns of a head",
              "shape " + shape_of(cos));
  for (const auto& [name, table] : {std::pair{"cos", &cos}, std::pair{"sin", &sin}}) {
    expect_same_device(op, name, *table, "q", q);
    expect_unit_last_stride(op, name, *table);
  }
  return {.cos = cos.const_data_ptr(),
          .sin = sin.const_data_ptr(),
          .cos_stride = cos.stride(0),
          .sin_stride = sin.stride(0),
          .dtype = expect_float_dtype(op, "cos", cos, true),
          .max_position = cos.size(0),
          .pairs = cos.size(1),
          .interleaved = interleaved};
}

ExactPool view_pool(const Op& op, const OptionalTensor& exact_k, const OptionalTensor& exact_v,
                    const OptionalTensor& exact_slots, const Tensor& k) {
  if (!exact_k && !exact_v && !exact_slots) return {};
  for (const auto& [name, given] : {std::pair{"exact_k", exact_k.has_value()},
                                    {"exact_v", exact_v.has_value()},
                                    {"exact_slots", exact_slots.has_value()}})
    if (!given) op.refuse(name, "exact_k, exact_v and exact_slots together", "None");
  if (exact_k->dim() != 4) op.refuse("exact_k", "shape (Pe, Ne, Hkv, D)", "shape " + shape_of(*exact_k));
  ExactPool pool{};
  pool.num_pages = exact_k->size(0);
  pool.page_size = exact_k->size(1);
  for (const auto& [name, t] : {std::pair{"exact_k", &*exact_k}, std::pair{"exact_v", &*exact_v}}) {
    expect_same_dtype(op, name, *t, "k", k);
    expect_same_device(op, name, *t, "k", k);
    expect_shape(op, name, *t, {{"Pe", pool.num_pages}, {"Ne", pool.page_size}, {"Hkv", k.size(1)}, {"D", k.size(2)}});
    expect_unit_last_stride(op, name, *t);
  }
  for (int i = 0; i < 3; ++i) {
    pool.k_stride[i] = exact_k->stride(i);
    pool.v_stride[i] = exact_v->stride(i);
  }
  pool.slots = index_view(op, "exact_slots", *exact_slots, {{"T", k.size(0)}}, "k", k);
  pool.k = exact_k->mutable_data_ptr();
  pool.v = exact_v->mutable_data_ptr();
  return pool;
}

// From so many tokens on a GPU turns keys first, and quantizes them as tbq4_append_ does: 8192 tokens of 32 query and 8
// KV heads take 63 us on an H200, not 159.
constexpr int64_t kLeastPromptTokens = 512;

void run_prompt(const Call& call, const Tbq4RopeAppendParams& p, ScalarType dtype) {
  const AppendSource& s = p.source;
  Tbq4RopeAppendParams turn = p;
  turn.source.kv_heads = 0;
  call.run(&Backend::tbq4_rope_append, turn);
  const Tensor turned = call.empty({s.tokens, s.kv_heads, s.head_dim}, dtype);
  turn.q = s.k;
  turn.q_out = turned.mutable_data_ptr();
  turn.q_stride[0] = s.k_stride[0];
  turn.q_stride[1] = s.k_stride[1];
  turn.q_heads = s.kv_heads;
  call.run_next(&Backend::tbq4_rope_append, turn);
  Tbq4AppendParams append = p;
  append.source.k = turned.const_data_ptr();
  append.source.k_stride[0] = s.kv_heads * s.head_dim;
  append.source.k_stride[1] = s.head_dim;
  call.run_next(&Backend::tbq4_append, append);
  if (!p.exact.slots.given()) return;
  KvAppendParams keep{};
  keep.source = append.source;
  keep.source.slots = p.exact.slots;
  keep.k_cache = p.exact.k;
  keep.v_cache = p.exact.v;
  std::copy_n(p.exact.k_stride, 3, keep.k_stride);
  std::copy_n(p.exact.v_stride, 3, keep.v_stride);
  keep.num_pages = p.exact.num_pages;
  keep.page_size = p.exact.page_size;
  call.run_next(&Backend::kv_append, keep);
}

}  // namespace

Tensor tbq4_rope_append_(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& cos, const Tensor& sin,
                         const Tensor& positions, const Tensor& k_codes, const Tensor& k_norms, const Tensor& v_codes,
                         const Tensor& v_norms, const Tensor& slots, const OptionalTensor& k_offsets,
                         const OptionalTensor& exact_k, const OptionalTensor& exact_v,
                         const OptionalTensor& exact_slots, bool interleaved) {
  constexpr Op op("tbq4_rope_append_");
  expect_given(op, {{"q", q},
                    {"k", k},
                    {"v", v},
                    {"cos", cos},
                    {"sin", sin},
                    {"positions", positions},
                    {"k_codes", k_codes},
                    {"k_norms", k_norms},
                    {"v_codes", v_codes},
                    {"v_norms", v_norms},
                    {"slots", slots}});
  const Call call(op, q);
  (void)expect_float_dtype(op, "q", q, true);
  expect_shape(op, "q", q, {{"T"}, {"Hq"}, {"D"}});
  expect_unit_last_stride(op, "q", q);
  expect_tbq4_head_dim(op, "q", q.size(2));
  expect_same_dtype(op, "k", k, "q", q);
  expect_same_device(op, "k", k, "q", q);
  expect_shape(op, "k", k, {{"T", q.size(0)}, {"Hkv"}, {"D", q.size(2)}});
  Tbq4RopeAppendParams p{};
  view_tbq4_append(op, call, k, v, {k_codes, k_norms, v_codes, v_norms}, slots, k_offsets, p);
  p.rotary = view_tables(op, cos, sin, q, interleaved);
  p.positions = index_view(op, "positions", positions, {{"T", q.size(0)}}, "q", q);
  p.exact = view_pool(op, exact_k, exact_v, exact_slots, k);
  p.q = q.const_data_ptr();
  p.q_stride[0] = q.stride(0);
  p.q_stride[1] = q.stride(1);
  p.q_heads = q.size(1);
  call.check_values(p);
  Tensor q_out = call.empty({q.size(0), q.size(1), q.size(2)}, q.scalar_type());
  p.q_out = q_out.mutable_data_ptr();
  if (!call.on_cpu() && q.size(0) >= kLeastPromptTokens)
    run_prompt(call, p, q.scalar_type());
  else
    call.run(&Backend::tbq4_rope_append, p);
  return q_out;
}

}  // namespace flashq
