// Attention over a TBQ4 cache: plans the call, then per unit the keys in codes, then those of the exact pool.
#include "cpu/kernels.h"
#include "cpu/tbq4/exact_tiles.h"

namespace flashq::FLASHQ_ISA {
namespace {

constexpr int64_t kRowsOfUnit = 96;  // looking a tile up costs about what 2 rows do

cpu::PlanOptions options_of(const AttentionTbq4Params&) {
  return {.few_rows = 0, .few_rows_heads = 1, .block_rows = kRowsOfUnit, .page_size = 0, .cu_seqlens_k = {}};
}

int64_t code_bytes(int64_t head_dim) {
  const int64_t bytes = head_dim == 64    ? CodeBlock<64>::scratch_bytes(kRowsOfUnit)
                        : head_dim == 128 ? CodeBlock<128>::scratch_bytes(kRowsOfUnit)
                                          : CodeBlock<256>::scratch_bytes(kRowsOfUnit);
  return round_up(bytes, 64);
}
int64_t worker_bytes(const AttentionTbq4Params& p) {
  const bool exact = p.kv.exact.k != nullptr;
  return code_bytes(p.query.head_dim) +
         (exact ? PackedBlock<WordsF32>::scratch_bytes(kRowsOfUnit, p.query.head_dim) : 0);
}

template <class T> void load_query(const void* q, int64_t at, int64_t head_dim, float* to) {
  for (int64_t d = 0; d < head_dim; d += kLanes) store(to + d, widen(static_cast<const T*>(q) + at + d));
}

template <int D, class T>
void run_unit(const AttentionTbq4Params& p, const Plan& plan, const Unit& u, std::byte* scratch) {
  const QueryView& q = p.query;
  const Sequence& s = *u.sequence;
  CodeBlock<D> block(p, plan, u, scratch);
  if (!u.keys.empty()) {
    for (int64_t r = 0; r < u.rows; ++r) {
      const int64_t query = (u.row + r) / plan.group, q_head = u.head * plan.group + (u.row + r) % plan.group;
      load_query<T>(q.q, s.batch * q.q_stride[0] + (s.q_begin + query) * q.q_stride[1] + q_head * q.q_stride[2], D,
                    block.raw_query(r));
    }
    block.attend();
    if (block.selector().any_exact()) attend_exact<D, T>(p, plan, u, block, scratch + code_bytes(D));
  }
  finish_unit(p, plan, u, block.rows(), [](int64_t, int64_t) -> const void* { return nullptr; });
}

template <int D> void run_dim(const AttentionTbq4Params& p, const Plan& plan, const Unit& u, std::byte* scratch) {
  switch (p.query.dtype) {
    case Dtype::kFloat32: return run_unit<D, float>(p, plan, u, scratch);
    case Dtype::kFloat16: return run_unit<D, Fp16>(p, plan, u, scratch);
    case Dtype::kBfloat16: return run_unit<D, Bf16>(p, plan, u, scratch);
  }
}

}  // namespace

int64_t tbq4_attention_scratch_bytes(const AttentionTbq4Params& p, int32_t workers) {
  return cpu::plan_scratch_bytes(p, options_of(p), worker_bytes(p), workers);
}

Status tbq4_attention(const AttentionTbq4Params& p, const Launch& launch) {
  const Plan plan = cpu::make_plan(p, options_of(p), worker_bytes(p), launch.workers);
  struct Call {
    const AttentionTbq4Params& params;
    const Plan& plan;
  } call{p, plan};
  const auto run = [](void* context, const Unit& u, std::byte* scratch) {
    const Call& c = *static_cast<Call*>(context);
    switch (c.params.query.head_dim) {
      case 64: return run_dim<64>(c.params, c.plan, u, scratch);
      case 128: return run_dim<128>(c.params, c.plan, u, scratch);
      default: return run_dim<256>(c.params, c.plan, u, scratch);
    }
  };
  cpu::run_units(plan, launch, run, &call);
  return {};
}

}  // namespace flashq::FLASHQ_ISA
