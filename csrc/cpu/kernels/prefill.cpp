// Many rows of queries over 16- or 32-bit keys and values: prefill, and decode of long drafts. See attention/packed.h.
#include "cpu/attention/packed.h"
#include "cpu/kernels.h"

namespace flashq::FLASHQ_ISA {
namespace {

// Tiles straight from rows of T, wherever they lie.
template <class T> struct RowTiles {
  using Words = typename Traits<T>::Words;

  KeyRows keys;
  const Mask& mask;
  int64_t kv_head, head_dim;

  FLASHQ_SIMD uint64_t bits(int64_t query, int64_t first_key) const {
    return tile_bits(mask.visible(query), first_key);
  }
  FLASHQ_SIMD uint64_t readable(int64_t first_key) const {
    return tile_bits(mask.visible(0, mask.q_len - 1), first_key);
  }
  FLASHQ_SIMD void pack(int64_t first_key, uint64_t readable, float* k, float* v) const {
    const T *k_rows[kTileK], *v_rows[kTileK];
    keys.locate(first_key, readable, kv_head, k_rows, v_rows);
    pack_keys<Words>(k_rows, head_dim / Words::kPerWord, k);
    pack_values<Words>(v_rows, head_dim, v, cpu::padded_dim(head_dim));
  }
};

template <class T> void run(const Attention16Params& p, const Plan& plan, const Unit& u, std::byte* scratch) {
  const QueryView& q = p.query;
  const Sequence& s = *u.sequence;
  PackedBlock<typename Traits<T>::Words> block(scratch, u.rows, q.head_dim);
  for (int64_t r = 0; r < u.rows; ++r) {
    const int64_t query = (u.row + r) / plan.group, q_head = u.head * plan.group + (u.row + r) % plan.group;
    block.load_query(r, static_cast<const T*>(q.q) + s.batch * q.q_stride[0] + (s.q_begin + query) * q.q_stride[1] +
                            q_head * q.q_stride[2]);
  }
  RowTiles<T> tiles{KeyRows(p.kv, s), s.mask, u.head, q.head_dim};
  block.template attend<Traits<T>::kExp2Degree>(u.keys, u.row, plan.group, ScoreRule(p.score), tiles);
  finish_unit(p, plan, u, block.rows(),
              [&](int64_t kv_head, int64_t key) { return tiles.keys.template value<T>(kv_head, key); });
}

}  // namespace

int64_t many_rows_worker_bytes(const Attention16Params& p, int64_t block_rows) {
  return p.query.dtype == Dtype::kBfloat16 ? PackedBlock<WordsOfBf16>::scratch_bytes(block_rows, p.query.head_dim)
                                           : PackedBlock<WordsF32>::scratch_bytes(block_rows, p.query.head_dim);
}

void run_many_rows(const Attention16Params& p, const Plan& plan, const Unit& u, std::byte* scratch) {
  switch (p.query.dtype) {
    case Dtype::kFloat32: return run<float>(p, plan, u, scratch);
    case Dtype::kFloat16: return run<Fp16>(p, plan, u, scratch);
    case Dtype::kBfloat16: return run<Bf16>(p, plan, u, scratch);
  }
}

}  // namespace flashq::FLASHQ_ISA
