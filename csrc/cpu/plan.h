// The work of one attention call on the CPU: which rows meet which keys, in units that threads pick up one by one.
//
// Row r of a (sequence, KV head) is query r / group of head r % group, so a block of rows spans few positions and the
// group's heads share every K/V tile. A unit is (sequence, block of KV heads, block of rows, split of the keys). Only
// the splits decide a row's bits; blocks and the number of threads do not.
#pragma once
#include <cstddef>

#include "backend.h"
#include "core/mask.h"
#include "core/work_plan.h"

namespace flashq::cpu {

// Rows of accumulators are padded to the widest vector.
FLASHQ_HD constexpr int64_t padded_dim(int64_t head_dim) { return round_up(head_dim, 16); }

struct Sequence {
  int64_t batch;             // its page, or its row of a page table
  int64_t q_begin, k_begin;  // where its tokens start, in packed q and packed K/V
  Mask mask;
  int64_t rows;  // of a KV head
  SplitPlan splits;
  int64_t block_rows, block_heads, row_blocks, head_blocks;
  int64_t first_unit, first_partial, first_counter;
  double unit_cost;  // of its heaviest unit, for the order
  bool few_rows;     // for the kernel of few rows
  bool padding;      // rows past cu_seqlens_q: 0 and -inf whatever the sinks
};

struct Unit {
  const Sequence* sequence;
  int64_t head, heads;  // KV heads [head, head + heads)
  int64_t row, rows;    // rows [row, row + rows) of each
  int64_t split;
  KeyRange keys;    // of the split that some row of the unit sees; may be empty
  int64_t counter;  // of the splits of these rows
};

struct PlanOptions {
  int64_t few_rows = 0;        // sequences of at most this many rows go to the kernel of few rows; 0: none
  int64_t few_rows_heads = 1;  // KV heads of such a unit at most
  int64_t block_rows = 192;    // rows of other units at most
  int64_t page_size = 0;       // a sequence's length where neither seqlens nor cu_seqlens_k gives it
  IndexView cu_seqlens_k;
};

struct Plan {
  int64_t group, kv_heads;
  int64_t width;              // floats of an accumulator row, padded_dim(head_dim)
  const Sequence* sequences;  // those with work, heaviest first
  int64_t sequence_count, units;
  double work;       // nanoseconds of one thread, roughly
  int64_t* next;     // the next unit to pick up
  int32_t* arrived;  // splits that are done, by Unit::counter
  float* partials;   // see partial()
  std::byte* worker_scratch;
  int64_t worker_bytes;

  // A row's unnormalised output, its maximum (base 2) and its sum, of one split.
  FLASHQ_HD int64_t partial_stride() const { return width + 16; }
  FLASHQ_HD float* partial(const Sequence& s, int64_t kv_head, int64_t row, int64_t split) const {
    return partials + (s.first_partial + (kv_head * s.rows + row) * s.splits.count + split) * partial_stride();
  }
  // Called when a unit has written its partials; true for the caller that has to merge them.
  FLASHQ_HD bool arrive_last(const Unit& u) const {
    return __atomic_add_fetch(arrived + u.counter, 1, __ATOMIC_ACQ_REL) == u.sequence->splits.count;
  }
};

// `worker_bytes`: scratch of one worker of the kernels that will run the units.
[[nodiscard]] int64_t plan_scratch_bytes(const AttentionParams&, const PlanOptions&, int64_t worker_bytes,
                                         int32_t workers);
// Lays the plan out in params.scratch, which holds plan_scratch_bytes of the same arguments.
[[nodiscard]] Plan make_plan(const AttentionParams&, const PlanOptions&, int64_t worker_bytes, int32_t workers);
// Runs every unit once, in one parallel region, or on the caller's thread where the work is small. `scratch` is
// worker_bytes of the worker's own, 64-byte aligned.
void run_units(const Plan&, const Launch&, void (*run)(void* context, const Unit&, std::byte* scratch), void* context);

}  // namespace flashq::cpu
