// The entry of prefill, prefill_varlen and decode: plans the call and sends each unit to the kernel for its rows.
#include "cpu/attention/packed.h"
#include "cpu/kernels.h"

namespace flashq::FLASHQ_ISA {
namespace {

cpu::PlanOptions options_of(const Attention16Params& p, int32_t workers) {
  return {.few_rows = cpu::kFewRows,
          .few_rows_heads = few_rows_heads(p, workers),
          .block_rows = kBlockRows,
          .page_size = p.kv.page_size,
          .cu_seqlens_k = p.kv.cu_seqlens_k};
}

int64_t worker_bytes(const Attention16Params& p, int32_t workers) {
  return max_of(many_rows_worker_bytes(p, kBlockRows), few_rows_worker_bytes(p, few_rows_heads(p, workers)));
}

}  // namespace

int64_t attention_16_scratch_bytes(const Attention16Params& p, int32_t workers) {
  return cpu::plan_scratch_bytes(p, options_of(p, workers), worker_bytes(p, workers), workers);
}

Status attention_16(const Attention16Params& p, const Launch& launch) {
  const Plan plan = cpu::make_plan(p, options_of(p, launch.workers), worker_bytes(p, launch.workers), launch.workers);
  struct Call {
    const Attention16Params& params;
    const Plan& plan;
  } call{p, plan};
  const auto run = [](void* context, const Unit& u, std::byte* scratch) {
    const Call& c = *static_cast<Call*>(context);
    const bool few = u.sequence->few_rows;
    (few ? run_few_rows : run_many_rows)(c.params, c.plan, u, scratch);
  };
  cpu::run_units(plan, launch, run, &call);
  return {};
}

}  // namespace flashq::FLASHQ_ISA
