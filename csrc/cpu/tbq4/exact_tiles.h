// Keys of a TBQ4 cache that are read from its exact pool, in q's dtype.
#pragma once
#include "cpu/attention/packed.h"
#include "cpu/tbq4/code_block.h"

namespace flashq::FLASHQ_ISA {
namespace {

template <class T> struct ExactTiles {
  KeyRows keys;
  const KeySelector& select;
  int64_t kv_head, head_dim;

  FLASHQ_SIMD uint64_t bits(int64_t query, int64_t first_key) const { return select.exact(query, first_key); }
  FLASHQ_SIMD uint64_t readable(int64_t first_key) const { return select.exact_of_any(first_key); }
  FLASHQ_SIMD void pack(int64_t first_key, uint64_t readable, float* k, float* v) const {
    const T *k_rows[kTileK], *v_rows[kTileK];
    keys.locate(first_key, readable, kv_head, k_rows, v_rows);
    pack_keys<WordsF32>(k_rows, head_dim, k);
    pack_values<WordsF32>(v_rows, head_dim, v, head_dim);
  }
};

// Adds the unit's exact keys to the block's rows. They are few, so the products stay in fp32 for every dtype: weights
// rounded to bf16 would be off by as much as the whole tolerance of the op.
template <int D, class T>
void attend_exact(const AttentionTbq4Params& p, const Plan& plan, const Unit& u, CodeBlock<D>& block,
                  std::byte* scratch) {
  const KeySelector& select = block.selector();
  const KeyRange ranges[2] = {select.leading(u.keys), select.recent(u.keys, u.row / plan.group)};
  if (ranges[0].empty() && ranges[1].empty()) return;
  PackedBlock<WordsF32> exact(scratch, u.rows, D);
  for (int64_t r = 0; r < u.rows; ++r) exact.load_query(r, static_cast<const float*>(block.raw_query(r)));
  ExactTiles<T> tiles{KeyRows(p.kv.exact, *u.sequence), select, u.head, D};
  for (const KeyRange& range : ranges) exact.template attend<6>(range, u.row, plan.group, ScoreRule(p.score), tiles);
  for (int64_t r = 0; r < u.rows; ++r) {
    const SoftmaxState<Binary> of_exact = exact.rows().state[r].total();
    if (of_exact.empty()) continue;
    SoftmaxState<Binary> state = block.state(r).total();
    merge_output(state, of_exact, block.acc(r), exact.acc(r), D);
    alignas(64) float sum[kLanes] = {state.sum};
    block.state(r) = {state.max, load(sum)};
  }
}

}  // namespace
}  // namespace flashq::FLASHQ_ISA
