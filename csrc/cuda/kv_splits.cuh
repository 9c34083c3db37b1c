// A short query over many keys: the keys of a tile of rows are split among blocks, whose partial results a second
// kernel merges.
#pragma once
#include <cuda_runtime_api.h>

#include "backend.h"
#include "cuda/row_block.cuh"

namespace flashq::cuda {

struct KvSplits {
  int count = 1;                    // at most; tiles with few keys need fewer
  int tile_rows, tile_keys, width;  // of the kernel that writes the partials; width: floats of a row of outputs
  float* partials = nullptr;        // of (tile, KV head, split): Partial

  static constexpr int kStateFloats = 2, kFlagFloats = 4;
  FLASHQ_HD int64_t partial_floats() const { return int64_t{tile_rows} * (width + kStateFloats) + kFlagFloats; }
  FLASHQ_HD int64_t bytes(int64_t tiles_and_heads) const {
    return count == 1 ? 0 : tiles_and_heads * count * partial_floats() * int64_t{sizeof(float)};
  }
};

// What a block leaves of its rows: unnormalised outputs, maxima (base 2) and sums, and whether all keys were there.
struct Partial {
  float* out;               // (tile_rows, width)
  Vector<float, 2>* state;  // (tile_rows): max, sum
  float* all_found;

  FLASHQ_HD Partial(const KvSplits& splits, int64_t tile_and_head, int split) {
    out = splits.partials + (tile_and_head * splits.count + split) * splits.partial_floats();
    state = reinterpret_cast<Vector<float, 2>*>(out + int64_t{splits.tile_rows} * splits.width);
    all_found = reinterpret_cast<float*>(state + splits.tile_rows);
  }
};

// Which splits of a sequence's keys a call of this shape gets: by the rows of one sequence, so that they do not
// depend on its batch mates; of a cache by all rows.
[[nodiscard]] int count_splits(const Attention16Params&, int tile_rows, int tile_keys);

// Merges the partials in the order of the splits and finishes the rows.
[[nodiscard]] Status combine_splits(const Attention16Params&, const KvSplits&, int64_t row_tiles, cudaStream_t);

}  // namespace flashq::cuda
