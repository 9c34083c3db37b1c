// Turns the queries of a prompt, or its keys: a copy, but for the angles. A lane holds both elements of eight pairs,
// and turns them in several heads by the angles that it loads once.
#include <cuda_runtime_api.h>

#include "core/rope.h"
#include "cuda/overlapping_launch.h"
#include "cuda/ptx/dependent_launch.cuh"
#include "cuda/rope_turn.h"
#include "cuda/tbq4/rows.cuh"

namespace flashq::cuda {
namespace {

constexpr int kThreads = 128, kBlocks = 5;  // of a multiprocessor
constexpr int kPairs = 8, kHeads = 8;       // of a lane

struct TurnParams {
  const void* from;
  void* to;  // contiguous
  int64_t token_stride, head_stride, heads;
  int64_t items;                // of a lane each
  WideDivisor token_groups;     // of kHeads heads
  int head_dim, row_lane_bits;  // 2^bits lanes a row
  RotaryTables rotary;
  IndexView positions;
};

// A lane's values of a row: two times kPairs neighbours, which turn with each other or, interleaved, among themselves;
// behind what turns they are only copied.
template <class T> struct Halves {
  static constexpr int kPiece = kVectorBytes / static_cast<int>(sizeof(typename T::Storage)), kPieces = kPairs / kPiece;
  Packed<T, kPiece> pieces[2][kPieces];

  __device__ __forceinline__ float get(int half, int i) const { return pieces[half][i / kPiece].get(i % kPiece); }
};

template <class T> __device__ __forceinline__ void turn(const Halves<T>& x, bool interleaved,
                                                        const float (&cos)[kPairs], const float (&sin)[kPairs],
                                                        float (&turned)[2][kPairs]) {
#pragma unroll
  for (int i = 0; i < kPairs; ++i) {
    const int half = 2 * i / kPairs, at = 2 * i % kPairs;  // of the first of pair i, interleaved
    const float a = interleaved ? x.get(half, at) : x.get(0, i), b = interleaved ? x.get(half, at + 1) : x.get(1, i);
    (interleaved ? turned[half][at] : turned[0][i]) = rope::first_of(a, b, cos[i], sin[i]);
    (interleaved ? turned[half][at + 1] : turned[1][i]) = rope::second_of(a, b, cos[i], sin[i]);
  }
}

template <class T> __device__ __forceinline__ void load_angles(const RotaryTables& rotary, const void* table,
                                                               int64_t at, float (&x)[kPairs]) {
  if (rotary.dtype == Dtype::kFloat32)
    load_values<Float32, true>(static_cast<const float*>(table) + at, x);
  else
    load_values<T, true>(static_cast<const typename T::Storage*>(table) + at, x);
}

template <class T> __global__ void __launch_bounds__(kThreads, kBlocks)
    turn_kernel(const __grid_constant__ TurnParams p) {
  using Storage = typename T::Storage;
  constexpr int kBatch = sizeof(Storage) == 4 ? 2 : 4;  // heads on their way at a time
  ptx::allow_dependents();
  ptx::wait_for_primary();
  const int64_t item = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (item >= p.items) return;
  const int lane = static_cast<int>(item) & ((1 << p.row_lane_bits) - 1), pairs = static_cast<int>(p.rotary.pairs);
  const Quotient at = p.token_groups.divide(item >> p.row_lane_bits);
  const int64_t head = at.remainder * kHeads;
  const int count = static_cast<int>(min_of<int64_t>(kHeads, p.heads - head));
  const bool turns = lane * kPairs < pairs, apart = turns && !p.rotary.interleaved;
  const int column[2] = {apart ? lane * kPairs : lane * 2 * kPairs,
                         apart ? lane * kPairs + pairs : lane * 2 * kPairs + kPairs};
  const auto* from = static_cast<const Storage*>(p.from) + at.quotient * p.token_stride + head * p.head_stride;
  auto* to = static_cast<Storage*>(p.to) + (at.quotient * p.heads + head) * p.head_dim;

  const int64_t position = p.positions(at.quotient);
  float cos[kPairs], sin[kPairs];
#pragma unroll
  for (int first = 0; first < kHeads; first += kBatch) {
    Halves<T> x[kBatch];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      if (first + i >= count) break;
#pragma unroll
      for (int half = 0; half < 2; ++half)
#pragma unroll
        for (int j = 0; j < Halves<T>::kPieces; ++j)
          x[i].pieces[half][j] = load<Packed<T, Halves<T>::kPiece>>(from + (first + i) * p.head_stride + column[half] +
                                                                    j * Halves<T>::kPiece);
    }
    if (first == 0 && turns) {
      // A position outside of the tables has no angle, but NaN.
#pragma unroll
      for (int i = 0; i < kPairs; ++i) cos[i] = sin[i] = float_of(0x7fffffff);
      if (position >= 0 && position < p.rotary.max_position) {
        load_angles<T>(p.rotary, p.rotary.cos, position * p.rotary.cos_stride + lane * kPairs, cos);
        load_angles<T>(p.rotary, p.rotary.sin, position * p.rotary.sin_stride + lane * kPairs, sin);
      }
    }
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      if (first + i >= count) break;
      float turned[2][kPairs];
      if (!turns) {
#pragma unroll
        for (int j = 0; j < 2 * kPairs; ++j) turned[j / kPairs][j % kPairs] = x[i].get(j / kPairs, j % kPairs);
      } else if (p.rotary.interleaved) {
        turn(x[i], true, cos, sin, turned);
      } else {
        turn(x[i], false, cos, sin, turned);
      }
#pragma unroll
      for (int half = 0; half < 2; ++half)
        store_values<T>(turned[half], to + int64_t{first + i} * p.head_dim + column[half]);
    }
  }
}

}  // namespace

void launch_turn(const Tbq4RopeAppendParams& p, const Device& device, const Launch& launch) {
  const int64_t head_dim = p.source.head_dim, groups = ceil_div(p.q_heads, kHeads);
  const int row_lane_bits = head_dim == 64 ? 2 : head_dim == 128 ? 3 : 4;
  const TurnParams params{.from = p.q,
                          .to = p.q_out,
                          .token_stride = p.q_stride[0],
                          .head_stride = p.q_stride[1],
                          .heads = p.q_heads,
                          .items = p.source.tokens * groups << row_lane_bits,
                          .token_groups = WideDivisor(groups),
                          .head_dim = static_cast<int>(head_dim),
                          .row_lane_bits = row_lane_bits,
                          .rotary = p.rotary,
                          .positions = p.positions};
  const dim3 grid(static_cast<unsigned>(ceil_div(params.items, kThreads)));
  with_dtype(p.source.dtype,
             [&](auto t) { launch_overlapping(turn_kernel<decltype(t)>, grid, kThreads, 0, device, launch, params); });
}

}  // namespace flashq::cuda
