// What the decode kernels get: the call, the plan's settings and where partial results go.
#pragma once
#include "cuda/decode/partials.cuh"
#include "cuda/decode/plan_table.cuh"
#include "cuda/softmax_step.cuh"

namespace flashq::cuda {

struct DecodeParams {
  Attention16Params call;
  SplitConfig split;  // its workers are teams
  ScoreRule rule;
  AlikeRule alike;
  Partials partials;
  Divisor page_size;
  Divisor row_blocks;     // of a sequence, where clusters are given
  int32_t cluster_ctas;   // a cluster of so many computes one item and merges its partial results; 0: the plan's shares
  int32_t cluster_shift;  // its logarithm
  int32_t team_warps;     // that share tiles and divide the rows: 1, 2 or 4
  int32_t team_shift;     // its logarithm
  int32_t stages;         // of each team's ring
  int64_t k_tile_bytes, v_tile_bytes;  // from tile to tile, where there are no pages,
  int32_t k_row_bytes, v_row_bytes;    // and from row to row
  bool wide_q;                         // rows of q can be read in 16-byte vectors,
  bool wide_kv;                        // and those of K and V
  bool whole_groups;                   // 16 keys from a multiple of 16 lie on one page
};

}  // namespace flashq::cuda
