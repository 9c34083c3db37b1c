// Encoding of many blocks: two lanes a block, and rows that arrive in shared memory while others are encoded.
//
// A warp owns an area of shared memory for 16 rows. As soon as its lanes hold their rows in registers, it starts the
// copies of the next 16, and encodes meanwhile. Rows lie 16 bytes further apart than they are long, so that the lanes'
// 16-byte reads do not conflict.
#pragma once
#include "cuda/ptx/dependent_launch.cuh"
#include "cuda/tbq4/bulk_rows.cuh"
#include "cuda/tbq4/pair_block.cuh"

namespace flashq::cuda {

template <class T, int kBlockWidth> struct BulkEncodePlan {
  using Type = T;
  static constexpr int kWidth = kBlockWidth, kBlocks = PairBlock<kWidth>::kBlocks;
  static constexpr int kRowBytes = kWidth * static_cast<int>(sizeof(typename T::Storage)), kRowStride = kRowBytes + 16;
  // Measured on an H200. Of 16-bit values more warps hide more, of fp32 more of them only compete.
  static constexpr int kMaxWarps = kWidth == 128 && sizeof(typename T::Storage) == 4 ? 12 : 16;

  // Shared memory: the table, then rows and slots of every warp. A cell's number is garbage where the length is 0, NaN
  // or Inf; it is looked up all the same.
  static constexpr int kSlots = kBlocks * kRowStride, kWarpBytes = kSlots + 32 * 8;
  static constexpr int shared_bytes(int warps) { return kTableBytes + warps * kWarpBytes; }
};

// Job: Plan, kHasOffsets, and on the device
//   int groups: of the blocks that a warp encodes at a time; `block` counts in the group
//   Place place(int group): what the others work out addresses by
//   bool lies_evenly(), EvenRows even_rows(Place): whether each group's rows do, and then where
//   const void* source(Place, int block): the row in global memory, or null
//   void start_slot(Place, int block, int64_t* to): starts to copy what target() needs to shared memory
//   int64_t target(Place, int block, int64_t slot): where the block goes, counted in blocks, or -1: nowhere
//   uint8_t* codes(Place), uint16_t* norms(Place): of block 0
//   const uint16_t* offsets(Place, int block, int64_t slot): fp16, to subtract from the row, or null
template <class Job> __global__ void __launch_bounds__(32 * Job::Plan::kMaxWarps, 1)
    bulk_encode_kernel(const __grid_constant__ Job job) {
  using Plan = typename Job::Plan;
  using T = typename Plan::Type;
  using Block = PairBlock<Plan::kWidth>;
  constexpr int kValues = Block::kValues, kPiece = kVectorBytes / static_cast<int>(sizeof(typename T::Storage));
  extern __shared__ __align__(1024) char shared[];
  ptx::allow_dependents();
  fill_encoding(shared);
  const Block block;
  const int lane = static_cast<int>(threadIdx.x) % 32, own = lane / Block::kLanes;
  char* const rows = shared + kTableBytes + threadIdx.x / 32 * Plan::kWarpBytes;
  int64_t* const slot_copy = reinterpret_cast<int64_t*>(rows + Plan::kSlots) + lane;
  const auto fetch = [&](const auto& place) {
    job.start_slot(place, own, slot_copy);
    if (job.lies_evenly())
      start_even_copies<Plan::kRowBytes, Plan::kRowStride, Block::kLanes>(rows, job.even_rows(place));
    else
      start_copies<Plan::kRowBytes, Plan::kRowStride, Block::kLanes>(rows,
                                                                     static_cast<const char*>(job.source(place, own)));
  };
  ptx::wait_for_primary();

  // Groups go to the multiprocessors in turn, so that each gets the same number of them.
  const int step = static_cast<int>(gridDim.x * (blockDim.x / 32));
  int group = static_cast<int>(blockIdx.x + gridDim.x * (threadIdx.x / 32));
  auto place = job.place(group);
  if (group < job.groups) fetch(place);
  __syncthreads();  // the table

  for (; group < job.groups; group += step) {
    ptx::cp_async_wait<0>();
    __syncwarp();
    const int64_t slot = *slot_copy, target = job.target(place, own, slot);
    const uint16_t* offsets = nullptr;
    if constexpr (Job::kHasOffsets) offsets = job.offsets(place, own, slot);
    float x[kValues], sums[kValues / kPiece];
#pragma unroll
    for (int r = 0; r < kValues; r += kPiece) {
      const int first = block.first_value(r);
      const auto piece = load<Packed<T, kPiece>>(rows + own * Plan::kRowStride + first * (kVectorBytes / kPiece));
#pragma unroll
      for (int j = 0; j < kPiece; ++j) x[r + j] = piece.get(j);
      if constexpr (Job::kHasOffsets) {
        if (offsets) {
          const auto offset = load<Packed<Float16, kPiece>>(offsets + first);
#pragma unroll
          for (int j = 0; j < kPiece; ++j) x[r + j] = ieee::sub(x[r + j], offset.get(j));
        }
      }
      sums[r / kPiece] = Job::kHasOffsets ? tbq4::energy_of<kPiece>(x + r) : energy_part<T, kPiece>(x + r);
    }
    const float squares = tbq4::tree_sum<kValues / kPiece>(sums);
    __syncwarp();  // every lane holds its values
    uint8_t* const codes = job.codes(place);
    uint16_t* const norms = job.norms(place);
    if (group + step < job.groups) {
      place = job.place(group + step);
      fetch(place);
    }

    const auto encoded = block.encode(x, squares, shared);
    if (target < 0) continue;
    constexpr int kRunWords = Block::kRun / 8;
#pragma unroll
    for (int run = 0; run < 2; ++run) {
      Vector<uint32_t, kRunWords> words;
#pragma unroll
      for (int i = 0; i < kRunWords; ++i) words.value[i] = encoded.codes[run * kRunWords + i];
      store(codes + target * (Plan::kWidth / 2) + block.run_start(run) / 2, words);
    }
    if (lane % Block::kLanes == 0) norms[target] = encoded.norm;
  }
}

}  // namespace flashq::cuda
