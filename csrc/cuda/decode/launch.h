// The decode kernels behind one call: which shapes there are, and a launch of one of them.
#pragma once
#include <cuda_runtime_api.h>

#include "cuda/decode/call.h"
#include "cuda/launch.h"

namespace flashq::cuda {

inline constexpr int kDecodeDims[] = {64, 128, 256};     // head dims of the kernels; others use the next larger
inline constexpr int kDecodeRows[] = {8, 16, 32, 64};    // rows of an item
inline constexpr int kDecodeTiles[] = {1, 2, 2, 2};      // of 8 rows, for each warp
inline constexpr int kDecodeTeamShift[] = {0, 0, 1, 2};  // logarithm of the warps that divide them
inline constexpr int kDecodeShapes = 4;

// Where WideRows are built for compute capability 9.0.
constexpr bool decode_goes_wide(int dim, int shape) { return kDecodeDims[dim] == 128 && kDecodeRows[shape] == 64; }

struct DecodeLaunch {
  int dim = 0, shape = 0;  // indices of kDecodeDims and kDecodeRows
  int warps = 0, stages = 0;
  int64_t shared_bytes = 0;
  int ctas = 0;
  int cluster = 0;    // CTAs of a cluster; 0: none
  bool wide = false;  // WideRows

  int teams() const { return ctas * (warps >> kDecodeTeamShift[shape]); }
};

// Bytes of shared memory that a kernel takes.
[[nodiscard]] int64_t decode_shared_bytes(int dim, int shape, int warps, int stages);

[[nodiscard]] Status launch_decode_fp16(const DecodeLaunch&, const DecodeParams&, const Launch&);
[[nodiscard]] Status launch_decode_bf16(const DecodeLaunch&, const DecodeParams&, const Launch&);

}  // namespace flashq::cuda
