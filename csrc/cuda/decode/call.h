// What the decode kernels get: the call, the plan's settings and where partial results go.
#pragma once
#include "cuda/decode/partials.cuh"
#include "cuda/decode/plan.cuh"
#include "cuda/softmax_step.cuh"

namespace flashq::cuda {

struct DecodeParams {
  Attention16Params call;
  SplitConfig split;
  ScoreRule rule;
  Partials partials;  // lists null: nothing is split
  Divisor page_size;
  int32_t team_warps;  // that share tiles and divide the rows: 1, 2 or 4
  int32_t team_shift;  // its logarithm
  int32_t stages;      // of each team's ring
  bool wide_q;         // rows of q can be read in 16-byte vectors,
  bool wide_kv;        // and those of K and V
  bool whole_groups;   // 16 keys from a multiple of 16 lie on one page
};

}  // namespace flashq::cuda
