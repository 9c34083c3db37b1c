// The decode kernels behind one call: which shapes there are, and a launch of one of them.
#pragma once
#include <cuda_runtime_api.h>

#include "cuda/decode/call.h"
#include "cuda/launch.h"

namespace flashq::cuda {

inline constexpr int kDecodeDims[] = {64, 128, 256};     // head dims of the kernels; others use the next larger
inline constexpr int kDecodeRows[] = {8, 16, 32, 64};    // rows of an item
inline constexpr int kDecodeTiles[] = {1, 1, 2, 2};      // of 8 rows, for each warp: two only in teams
inline constexpr int kDecodeTeamShift[] = {0, 1, 1, 2};  // logarithm of the warps that divide them
inline constexpr int kDecodeShapes = 4;

struct DecodeLaunch {
  int dim, shape;  // indices of kDecodeDims and kDecodeRows
  int warps;
  int64_t shared_bytes;
  int ctas;
};

// Bytes of shared memory that a kernel takes.
[[nodiscard]] int64_t decode_shared_bytes(int dim, int shape, int warps, int stages);

[[nodiscard]] Status launch_decode_fp16(const DecodeLaunch&, const DecodeParams&, const Launch&);
[[nodiscard]] Status launch_decode_bf16(const DecodeLaunch&, const DecodeParams&, const Launch&);

}  // namespace flashq::cuda
