// tbq4_append_: new tokens, quantized into the slots of a paged TBQ4 cache. K and V are the two halves of the grid.
#include <cuda_runtime_api.h>

#include "cuda/check.cuh"
#include "cuda/kernels.h"
#include "cuda/launch.h"
#include "cuda/tbq4/lanes.cuh"
#include "cuda/tbq4/rows.cuh"

namespace flashq::cuda {
namespace {

constexpr int kThreads = 128;

template <class T, int kWidth, bool kVector> __global__ void __launch_bounds__(kThreads)
    append_kernel(const __grid_constant__ Tbq4AppendParams p, Finding* finding) {
  using Lanes = BlockLanes<kWidth>;
  constexpr int kValues = Lanes::kValues, kBlocks = kThreads / Lanes::kLanes;
  const Lanes lanes;
  const AppendSource& s = p.source;
  const bool is_value = blockIdx.y != 0;
  const auto* from = static_cast<const typename T::Storage*>(is_value ? s.v : s.k);
  const int64_t token_stride = is_value ? s.v_stride[0] : s.k_stride[0];
  const int64_t head_stride = is_value ? s.v_stride[1] : s.k_stride[1];
  uint8_t* to_codes = is_value ? p.v_codes : p.k_codes;
  uint16_t* to_norms = is_value ? p.v_norms : p.k_norms;
  const uint16_t* offsets = is_value ? nullptr : p.k_offsets;

  const int row_blocks = static_cast<int>(s.head_dim) / kWidth;  // 1 or 2
  const int64_t token_blocks = s.kv_heads * row_blocks, blocks = s.tokens * token_blocks;
  for (int64_t first = int64_t{blockIdx.x} * kBlocks; first < blocks; first += int64_t{gridDim.x} * kBlocks) {
    const int64_t block = first + static_cast<int>(threadIdx.x) / Lanes::kLanes;
    float x[kValues] = {};
    int64_t target = -1;  // the block in the planes
    if (block < blocks) {
      const auto [token, within] = divide(block, token_blocks);
      const int64_t head = row_blocks == 1 ? within : within >> 1;
      const int part = row_blocks == 1 ? 0 : static_cast<int>(within & 1);
      const int column = part * kWidth + lanes.lane() * kValues;
      const int64_t slot = s.slots(token);
      load_values<T, kVector>(from + token * token_stride + head * head_stride + column, x);
      if (slot >= 0) {
        const auto [page, at] = divide(slot, p.page_size);
        if (page < p.num_pages) {
          target = ((page * s.kv_heads + head) * p.page_size + at) * row_blocks + part;
          if (offsets) {
            float offset[kValues];
            load_values<Float16, kVector>(offsets + page * p.k_offsets_stride[0] + head * p.k_offsets_stride[1] +
                                              column,
                                          offset);
#pragma unroll
            for (int i = 0; i < kValues; ++i) x[i] = ieee::sub(x[i], offset[i]);
          }
        } else if (!is_value && within == 0 && lanes.lane() == 0) {
          report(finding, Finding::kTbq4AppendSlot, token, slot, p.num_pages * p.page_size);
        }
      }
    }
    const auto [codes, norm] = lanes.encode(x);
    if (target >= 0) {
      store_codes<kVector>(to_codes + target * (kWidth / 2) + lanes.lane() * (kValues / 2), codes);
      if (lanes.lane() == 0) to_norms[target] = norm;
    }
  }
}

// Or-ed bits of every address that the kernel's wide loads and stores are made of, 4 bytes of a plane counting as 16.
template <class T> uintptr_t address_bits(const Tbq4AppendParams& p) {
  constexpr auto kElement = static_cast<int64_t>(sizeof(typename T::Storage));
  const AppendSource& s = p.source;
  uintptr_t all = reinterpret_cast<uintptr_t>(s.k) | reinterpret_cast<uintptr_t>(s.v);
  for (const int64_t* stride : {s.k_stride, s.v_stride}) {
    if (s.tokens > 1) all |= static_cast<uintptr_t>(stride[0] * kElement);
    if (s.kv_heads > 1) all |= static_cast<uintptr_t>(stride[1] * kElement);
  }
  all |= (reinterpret_cast<uintptr_t>(p.k_codes) | reinterpret_cast<uintptr_t>(p.v_codes)) * 4;
  if (p.k_offsets) {
    all |= reinterpret_cast<uintptr_t>(p.k_offsets);
    for (const int64_t stride : p.k_offsets_stride) all |= static_cast<uintptr_t>(stride * 2);
  }
  return all;
}

}  // namespace

Status tbq4_append(const Tbq4AppendParams& params, const Launch& launch) {
  if (const Status status = enter(launch); !status.ok()) return status;
  const AppendSource& s = params.source;
  if (s.tokens == 0 || s.kv_heads == 0) return {};
  Tbq4AppendParams p = params;
  p.num_pages = params.page_size == 0 ? 0 : params.num_pages;  // pages of no slots: every slot is out of range
  p.page_size = max_of<int64_t>(params.page_size, 1);
  const auto stream = static_cast<cudaStream_t>(launch.stream);
  with_dtype(s.dtype, [&](auto t) {
    using T = decltype(t);
    with_width(s.head_dim, address_bits<T>(p) % kVectorBytes == 0, [&](auto width, auto aligned) {
      constexpr int kBlocks = kThreads / BlockLanes<width.value>::kLanes;
      const int64_t blocks = s.tokens * s.kv_heads * (s.head_dim / width.value);
      const dim3 grid(static_cast<unsigned>(min_of<int64_t>(ceil_div(blocks, kBlocks), INT32_MAX)), 2);
      append_kernel<T, width.value, aligned.value != 0><<<grid, kThreads, 0, stream>>>(p, finding_of(launch));
    });
  });
  return launch_status();
}

}  // namespace flashq::cuda
