// What the kernels of tbq4_attention get: the call, the plan's settings and where partial results go.
#pragma once
#include "cuda/decode/partials.cuh"
#include "cuda/decode/plan.cuh"
#include "cuda/softmax_step.cuh"

namespace flashq::cuda {

// Byte offsets in dynamic shared memory. The table of pairs (operands.cuh) comes first.
struct SharedPlan {
  int32_t codes, norms, offsets;         // rings: (warps, stages)
  int32_t query, rest_query, raw_query;  // in fragments (queries.cuh)
  int32_t rest_table;
  int32_t scales, offset_scales;  // (rows of an item) floats
  int32_t states, ranges;         // (warps, rows), (rows)
  int32_t segments, reach;        // (warps), a word
  int32_t parked, end;            // results that do not fit the unused halves of the table's rows
};

struct CodeParams {
  AttentionTbq4Params call;
  SplitConfig split;
  ScoreRule rule;
  Partials partials;
  SharedPlan at;
  Divisor page_size, exact_page_size;
  int32_t stages;     // of each warp's ring
  int32_t rows;       // that an item has at most
  bool whole_groups;  // 16 tokens from a multiple of 16 lie on one page, and all of it can be copied in 16-byte pieces
  bool wide_codes;    // so can the codes of a token,
  bool wide_offsets;  // an offset,
  bool wide_q;        // a query,
  bool wide_exact;    // and a key or value of the exact pool
  bool exact;         // some keys may be read from the exact pool
  bool plain;         // a score is q.k times a factor
};

}  // namespace flashq::cuda
