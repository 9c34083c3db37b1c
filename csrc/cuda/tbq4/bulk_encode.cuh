// Encoding of many blocks: a thread a block, and rows that arrive in shared memory while others are encoded.
//
// A warp owns an area of shared memory for 32 rows. As soon as its lanes hold their rows in registers, it starts the
// copies of the next 32, and encodes meanwhile. Rows lie 16 bytes further apart than they are long, so that the lanes'
// 16-byte reads of one column do not conflict; the same holds for the codes, which go back through shared memory.
#pragma once
#include "cuda/tbq4/bulk_rows.cuh"
#include "cuda/tbq4/whole_block.cuh"

namespace flashq::cuda {

template <class T, int kBlockWidth> struct BulkEncodePlan {
  using Type = T;
  static constexpr int kWidth = kBlockWidth;
  static constexpr int kRowBytes = kWidth * static_cast<int>(sizeof(typename T::Storage)), kRowStride = kRowBytes + 16;
  static constexpr int kCodeBytes = kWidth / 2, kCodeStride = kCodeBytes + 16;
  // As many warps as the registers hold, or on an H200 the shared memory.
  static constexpr int kMaxWarps = kWidth == 64 ? 16 : sizeof(typename T::Storage) == 4 ? 8 : 12;
  static constexpr int kEnergyRow = sizeof(typename T::Storage) == 4 ? 128 : kTableRow;

  // Shared memory: the tables, then rows and codes of every warp.
  static constexpr int kEnergies = kCellTableBytes, kWarps = kEnergies + 256 * kEnergyRow;
  static constexpr int kWarpBytes = 32 * (kRowStride + kCodeStride);
  static constexpr int shared_bytes(int warps) { return kWarps + warps * kWarpBytes; }
  // A cell's number is garbage where the length is 0, NaN or Inf; it is looked up all the same.
  static_assert(256 * kTableRow <= shared_bytes(1));
};

// Job: Plan, kHasOffsets, and on the device
//   int groups: of 32 blocks; block 32 * group + lane is the lane's
//   const void* source(int group, int lane): the row in global memory, or null
//   Target target(int group, int lane): `codes` (null: nothing is written) and `norm`, where the block goes
//   const uint16_t* offsets(int group, int lane): fp16, to subtract from the row, or null
template <class Job> __global__ void __launch_bounds__(32 * Job::Plan::kMaxWarps, 1)
    bulk_encode_kernel(const __grid_constant__ Job job) {
  using Plan = typename Job::Plan;
  using T = typename Plan::Type;
  constexpr int kWidth = Plan::kWidth, kPiece = kVectorBytes / static_cast<int>(sizeof(typename T::Storage));
  extern __shared__ __align__(1024) char shared[];
  const int warp = static_cast<int>(threadIdx.x / 32);
  const int rows = Plan::kWarps + warp * Plan::kWarpBytes, codes = rows + 32 * Plan::kRowStride;  // offsets in shared
  const auto fetch = [&](int group) {
    const int lane = ptx::fresh_lane();
    const auto* source = static_cast<const char*>(job.source(group, lane));
    start_copies<Plan::kRowBytes, Plan::kRowStride>(shared + rows, source, lane);
  };

  // Groups go to the multiprocessors in turn, so that each gets the same number of them.
  const int step = static_cast<int>(gridDim.x * (blockDim.x / 32));
  int group = static_cast<int>(blockIdx.x) + static_cast<int>(gridDim.x) * warp;
  if (group < job.groups) fetch(group);
  fill_cells(shared);
  fill_energies<Plan::kEnergyRow>(shared + Plan::kEnergies);
  __syncthreads();

  for (; group < job.groups; group += step) {
    const uint16_t* offsets = nullptr;
    if constexpr (Job::kHasOffsets) offsets = job.offsets(group, ptx::fresh_lane());
    ptx::cp_async_wait<0>();
    __syncwarp();
    const char* const row = shared + rows + ptx::fresh_lane() * Plan::kRowStride;
    float x[kWidth], sums[kWidth / kPiece];
#pragma unroll
    for (int i = 0; i < kWidth; i += kPiece) {
      const auto piece = load<Packed<T, kPiece>>(row + i / kPiece * kVectorBytes);
#pragma unroll
      for (int j = 0; j < kPiece; ++j) x[i + j] = piece.get(j);
      if constexpr (Job::kHasOffsets) {
        if (offsets) {
          const auto offset = load<Packed<Float16, kPiece>>(offsets + i);
#pragma unroll
          for (int j = 0; j < kPiece; ++j) x[i + j] = ieee::sub(x[i + j], offset.get(j));
        }
      }
      sums[i / kPiece] = Job::kHasOffsets ? tbq4::energy_of<kPiece>(x + i) : energy_part<T, kPiece>(x + i);
    }
    const float squares = tbq4::tree_sum<kWidth / kPiece>(sums);
    __syncwarp();  // every lane holds its row
    if (group + step < job.groups) fetch(group + step);

    const auto block = encode_whole<kWidth, Plan::kEnergyRow>(x, squares, shared, shared + Plan::kEnergies);
    const int lane = ptx::fresh_lane();
    const auto target = job.target(group, lane);
#pragma unroll
    for (int j = 0; j < kWidth / 8; j += 4) {
      const Vector<uint32_t, 4> words{block.codes[j], block.codes[j + 1], block.codes[j + 2], block.codes[j + 3]};
      store(shared + codes + lane * Plan::kCodeStride + 4 * j, words);
    }
    if (target.codes) *target.norm = block.norm;
    __syncwarp();
    copy_out<Plan::kCodeBytes, Plan::kCodeStride>(shared + codes, reinterpret_cast<char*>(target.codes), lane);
    __syncwarp();  // before the next group's codes
  }
}

}  // namespace flashq::cuda
