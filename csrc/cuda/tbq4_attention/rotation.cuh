// The rotation of blocks (core/tbq4/rotation.h) where attention needs it: of rows of four neighbouring values a lane.
#pragma once
#include "core/tbq4/codebook.h"
#include "cuda/tbq4/lanes.cuh"

namespace flashq::cuda {

// A block of kWidth values is spread over kWidth / 4 neighbouring lanes. All lanes of a warp take part.
template <int kWidth, bool kInverse> __device__ __forceinline__ void rotate_fours(float (&v)[4]) {
  constexpr int kLanes = kWidth / 4;
  const int lane = static_cast<int>(threadIdx.x) % kLanes;
  const auto flip = [&](bool in) {
    const uint32_t bits = kDeviceSigns[in ? 0 : 1][lane / 8] >> (lane % 8 * 4);
#pragma unroll
    for (int i = 0; i < 4; ++i) v[i] = tbq4::flip(v[i], bits << (31 - i) & 0x80000000);
  };
  flip(!kInverse);
  tbq4::hadamard<4>(v);
#pragma unroll
  for (int step = 1; step < kLanes; step *= 2) {
    const float sign = lane & step ? -1.f : 1.f;
#pragma unroll
    for (int i = 0; i < 4; ++i) v[i] = fmaf(sign, v[i], __shfl_xor_sync(~0u, v[i], step));
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) v[i] *= tbq4::kInvSqrtWidth<kWidth>;
  flip(kInverse);
}
template <int kWidth, bool kInverse> __device__ __forceinline__ void rotate_fours(float4& o) {
  float v[4] = {o.x, o.y, o.z, o.w};
  rotate_fours<kWidth, kInverse>(v);
  o = {v[0], v[1], v[2], v[3]};
}

}  // namespace flashq::cuda
