// What the kernels of tbq4_attention get: the call, the plan's settings and where partial results go.
#pragma once
#include "cuda/decode/partials.cuh"
#include "cuda/decode/plan.cuh"
#include "cuda/softmax_step.cuh"

namespace flashq::cuda {

// Byte offsets in dynamic shared memory. The table of pairs (operands.cuh) comes first, then the rings of tiles.
struct SharedPlan {
  int32_t offsets;        // (warps): what those of some pages add to scores
  int32_t states;         // (warps, rows): scales of queries; and their totals, where results are parked
  int32_t segments, end;  // (warps)
};

struct CodeParams {
  AttentionTbq4Params call;
  SplitConfig split;
  ScoreRule rule;
  Partials partials;
  SharedPlan at;
  Divisor page_size, exact_page_size;
  Divisor row_blocks;                   // items of a KV head of a sequence, where clusters compute them
  int32_t cluster_ctas, cluster_shift;  // CTAs of a cluster, and their logarithm; 0: none
  int32_t rows;                         // that an item has at most
  int32_t code_ctas;                    // that stream codes; those behind them have exact tokens
  int32_t exact_slot;                   // the first slot of exact tokens
  int32_t exact_queries, exact_eights;  // query tokens of an item at most, and eights of the rows of one
  int32_t exact_parts, exact_tasks;     // warps that share eight rows, a power of two; and those of all items
  bool page_scores;                     // there are offsets, and 16 tokens from a multiple of 16 have one of them
  bool whole_groups;  // 16 tokens from a multiple of 16 lie on one page, and all of it can be copied in 16-byte pieces
  bool wide_codes;    // so can the codes of a token,
  bool wide_offsets;  // an offset,
  bool wide_q;        // a query,
  bool wide_exact;    // and a key or value of the exact pool
  bool exact;         // some keys may be read from the exact pool
  bool curved;        // a score is more than q.k times a factor, plus what its page's offset adds
  bool straight;      // it is neither
};

}  // namespace flashq::cuda
