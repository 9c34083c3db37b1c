// The entry of prefill, prefill_varlen and decode: plans the call and sends each unit to the kernel for its rows.
#include "cpu/attention/packed.h"
#include "cpu/kernels.h"

namespace flashq::FLASHQ_ISA {
namespace {

cpu::PlanOptions options_of(const Attention16Params& p) {
  return {.few_rows = 0, .few_rows_heads = 1, .block_rows = kBlockRows, .page_size = p.kv.page_size,
          .cu_seqlens_k = p.kv.cu_seqlens_k};
}

int64_t worker_bytes(const Attention16Params& p) { return many_rows_worker_bytes(p, kBlockRows); }

}  // namespace

int64_t attention_16_scratch_bytes(const Attention16Params& p, int32_t workers) {
  return cpu::plan_scratch_bytes(p, options_of(p), worker_bytes(p), workers);
}

Status attention_16(const Attention16Params& p, const Launch& launch) {
  const Plan plan = cpu::make_plan(p, options_of(p), worker_bytes(p), launch.workers);
  struct Call {
    const Attention16Params& params;
    const Plan& plan;
  } call{p, plan};
  const auto run = [](void* context, const Unit& u, std::byte* scratch) {
    const Call& c = *static_cast<Call*>(context);
    run_many_rows(c.params, c.plan, u, scratch);
  };
  cpu::run_units(plan, launch, run, &call);
  return {};
}

}  // namespace flashq::FLASHQ_ISA
