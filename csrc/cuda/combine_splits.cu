// Merges what the blocks of a split tile of rows left. A warp owns a row and walks the splits in order.
#include "cuda/finish_rows.cuh"
#include "cuda/kv_splits.cuh"
#include "cuda/launch.h"

namespace flashq::cuda {
namespace {

constexpr int kWarps = 4, kThreads = 32 * kWarps;
constexpr int kRows = 4 * kWarps;  // of a block

// Blocks that the larger GPUs run at once: enough of them keep an SM busy, whatever the rest of the batch.
constexpr int64_t kSlots = 264;
constexpr int kMostSplits = 32;
constexpr int64_t kMostBlocks = 4 * kSlots;  // of one sequence, or of a cache; bounds the scratch of that

template <class T> __device__ __forceinline__ void store_values(void* out, int64_t at, const float (&x)[2]) {
  Packed<T, 2> pair;
  pair.set(0, x[0]);
  pair.set(1, x[1]);
  store(static_cast<typename T::Storage*>(out) + at, pair.words);
}

// kPairs: pairs of columns of a lane, 64 apart.
template <class T, int kPairs> __global__ void __launch_bounds__(kThreads)
    combine_kernel(const __grid_constant__ Attention16Params p, const __grid_constant__ KvSplits splits) {
  const QueryView& q = p.query;
  const Quotient at = divide(blockIdx.x, q.kv_heads);
  const RowTile tile = locate_row_tile(p, splits.tile_rows, at.quotient);
  if (tile.sequence.empty()) return;
  RowBlock block(p, tile, at.remainder, splits.tile_rows, splits.tile_keys);
  const int used = block.split_count(splits.count);
  if (used == 1) return;  // its block has written the rows

  const int lane = static_cast<int>(threadIdx.x) % 32, first = static_cast<int>(blockIdx.y * kRows);
  for (int row = first + static_cast<int>(threadIdx.x) / 32; row < min_of(first + kRows, block.rows); row += kWarps) {
    const RowPlace place = block.place(row);
    SoftmaxState<Binary> total;
    float o[kPairs][2] = {};
    bool all_found = true;
    for (int split = 0; split < used; ++split) {
      const Partial part(splits, blockIdx.x, split);
      const Vector<float, 2> state = part.state[row];
      all_found &= *part.all_found != 0;
      const SoftmaxState<Binary> of_split{state.value[0], state.value[1]};
      if (of_split.empty()) continue;
      const bool fresh = total.empty();
      const MergeWeights weight = merge(total, of_split);
#pragma unroll
      for (int i = 0; i < kPairs; ++i) {
        const auto x = load<Vector<float, 2>>(part.out + int64_t{row} * splits.width + 64 * i + 2 * lane);
        for (int j = 0; j < 2; ++j) o[i][j] = fresh ? x.value[j] : o[i][j] * weight.a + x.value[j] * weight.b;
      }
    }
    const FinishedRow done = finish_row(p, block, place, total, all_found);
    if (lane == 0) q.lse[block.offset(place, q.lse_stride[0], q.lse_stride[2], q.lse_stride[1])] = done.lse;
    const int64_t out = block.offset(place, q.out_stride[0], q.out_stride[1], q.out_stride[2]);
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      const int column = 64 * i + 2 * lane;
      if (column >= q.head_dim) continue;
      for (int j = 0; j < 2; ++j) o[i][j] = done.zero ? 0 : o[i][j] * done.scale;
      store_values<T>(q.out, out + column, o[i]);
    }
  }
}

template <class T> void launch_combine(const Attention16Params& p, const KvSplits& splits, int64_t row_tiles,
                                       cudaStream_t stream) {
  const dim3 grid(static_cast<unsigned>(row_tiles * p.query.kv_heads),
                  static_cast<unsigned>(ceil_div(splits.tile_rows, kRows)));
  switch (splits.width) {
    case 64: combine_kernel<T, 1><<<grid, kThreads, 0, stream>>>(p, splits); break;
    case 128: combine_kernel<T, 2><<<grid, kThreads, 0, stream>>>(p, splits); break;
    default: combine_kernel<T, 4><<<grid, kThreads, 0, stream>>>(p, splits); break;
  }
}

}  // namespace

int count_splits(const Attention16Params& p, int tile_rows, int tile_keys) {
  const QueryView& q = p.query;
  // Packed keys: their sequences' rows, which may not depend on batch mates, are known to the device alone. kv_chunk:
  // rows may not depend on the batch or the capacity either.
  if (p.kv.cu_seqlens_k.given() || p.kv_chunk > 0) return 1;
  const bool cache = p.seqlens.given();
  const int64_t rows = q.q_len * (q.q_heads / q.kv_heads);
  const int64_t blocks = q.kv_heads * (cache ? count_row_tiles(q, tile_rows) : ceil_div(rows, tile_rows));
  // Keys that a tile may see. A cache's lengths are the device's.
  int64_t keys = cache ? INT32_MAX : p.kv.page_size;
  const int64_t right = p.score.causal ? 0 : p.score.window_right;
  if (p.score.window_left >= 0 && right >= 0) keys = min_of(keys, p.score.window_left + right + tile_rows);
  const int64_t most = min_of(min_of<int64_t>(kMostSplits, keys / (tile_keys * RowBlock::kLeastSplitTiles)),
                              kMostBlocks / max_of<int64_t>(blocks, 1));
  int best = 1;
  double best_use = 0;  // of the slots, less 1 % a split for its partial results
  for (int n = 1; n <= most; ++n) {
    const int64_t waves = ceil_div(blocks * n, kSlots);
    const double use = static_cast<double>(blocks * n) / static_cast<double>(waves * kSlots) * (1 - 0.01 * (n - 1));
    if (use <= best_use) continue;
    best_use = use;
    best = n;
  }
  return best;
}

Status combine_splits(const Attention16Params& p, const KvSplits& splits, int64_t row_tiles, cudaStream_t stream) {
  switch (p.query.out_dtype) {
    case Dtype::kFloat32: launch_combine<Float32>(p, splits, row_tiles, stream); break;
    case Dtype::kFloat16: launch_combine<Float16>(p, splits, row_tiles, stream); break;
    case Dtype::kBfloat16: launch_combine<Bfloat16>(p, splits, row_tiles, stream); break;
  }
  return launch_status();
}

}  // namespace flashq::cuda
