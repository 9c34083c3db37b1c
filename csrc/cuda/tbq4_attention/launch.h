// The kernels of tbq4_attention behind one call each.
#pragma once
#include "cuda/launch.h"
#include "cuda/tbq4_attention/call.h"

namespace flashq::cuda {

struct CodeLaunch {
  int tiles;  // of 8 rows, of an item
  int warps, ctas;
  int64_t shared_bytes;
};

// Rows of an item: 16 cost less than twice what 8 do, but of D 256 their outputs do not fit the registers.
inline constexpr int most_code_tiles(int64_t head_dim) { return head_dim == 256 ? 1 : 2; }

// Warps of a CTA at most: three for each scheduler, or two where a thread needs all the registers that it can have.
inline constexpr int most_code_warps(int64_t head_dim, int tiles) { return head_dim == 256 || tiles == 2 ? 8 : 12; }

template <int D> [[nodiscard]] Status launch_code_attention(const CodeLaunch&, const CodeParams&, const Launch&);

}  // namespace flashq::cuda
