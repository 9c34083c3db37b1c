// tbq4_append_: new tokens, quantized into the slots of a paged TBQ4 cache.
#include <cuda_runtime_api.h>

#include "cuda/kernels.h"
#include "cuda/launch.h"
#include "cuda/tbq4/bulk_encode.cuh"
#include "cuda/tbq4/bulk_launch.cuh"
#include "cuda/tbq4/lanes.cuh"
#include "cuda/tbq4/rows.cuh"

namespace flashq::cuda {
namespace {

// Keys, or values.
struct Half {
  const void* from;
  int64_t token_stride, head_stride;
  uint8_t* codes;
  uint16_t* norms;
};

// One index a token, which kernels can copy to shared memory.
struct Slots {
  IndexView view;

  __device__ __forceinline__ int64_t operator()(int64_t token) const { return view(token); }
  __device__ __forceinline__ void start_copy(int64_t token, int64_t* to) const {
    const auto* from = static_cast<const char*>(view.data) + token * (view.stride[0] * (view.is_int64 ? 8 : 4));
    if (view.is_int64)
      ptx::cp_async_8(to, from);
    else
      ptx::cp_async_4(to, from);
  }
  // From what the copy wrote.
  __device__ __forceinline__ int64_t copied(int64_t bits) const {
    return view.is_int64 ? bits : static_cast<int32_t>(bits);
  }
};

struct AppendParams {
  Half halves[2];
  const uint16_t* k_offsets;
  int64_t k_offsets_stride[2];
  Slots slots;
  int64_t num_pages, kv_heads, slot_count;
  WideDivisor page_size, token_blocks;  // blocks of a token: kv_heads * row_blocks
  int64_t blocks;                       // of each half
  int row_blocks;
  bool narrow;                       // the planes have less than 2^31 blocks
  Divisor narrow_page = Divisor(1);  // page_size, where narrow
};

template <class Index> struct BlockOf {
  Index token, head;
  int part;  // of the row
};
using Block = BlockOf<int64_t>;
__device__ __forceinline__ Block block_at(const AppendParams& p, int64_t index) {
  const Quotient at = p.token_blocks.divide(index);
  if (p.row_blocks == 1) return {at.quotient, at.remainder, 0};
  return {at.quotient, at.remainder >> 1, static_cast<int>(at.remainder & 1)};
}

template <class T, int kWidth, class Index>
__device__ __forceinline__ const typename T::Storage* source_of(const Half& half, const BlockOf<Index>& block) {
  return static_cast<const typename T::Storage*>(half.from) + block.token * half.token_stride +
         block.head * half.head_stride + block.part * kWidth;
}

// The block of the planes that a slot gives, or -1 where it gives none.
template <class Index>
__device__ __forceinline__ int64_t target_of(const AppendParams& p, const BlockOf<Index>& block, int64_t slot) {
  if (p.narrow) {
    if (static_cast<uint64_t>(slot) >= static_cast<uint64_t>(p.slot_count)) return -1;
    const auto narrow = static_cast<int>(slot);
    const int page = p.narrow_page.quotient(narrow), page_size = static_cast<int>(p.narrow_page.value);
    return ((page * static_cast<int>(p.kv_heads) + static_cast<int>(block.head)) * page_size + narrow -
            page * page_size) *
               p.row_blocks +
           block.part;
  }
  if (slot < 0) return -1;
  const Quotient at = p.page_size.divide(slot);
  if (at.quotient >= p.num_pages) return -1;
  return ((at.quotient * p.kv_heads + block.head) * p.page_size.value() + at.remainder) * p.row_blocks + block.part;
}

// The offset of a key in a page that exists.
template <int kWidth, class Index>
__device__ __forceinline__ const uint16_t* offset_of(const AppendParams& p, const BlockOf<Index>& block, int64_t slot) {
  return p.k_offsets + p.page_size.divide(slot).quotient * p.k_offsets_stride[0] + block.head * p.k_offsets_stride[1] +
         block.part * kWidth;
}

// For few tokens. blockIdx.y: keys, values.
template <class T, int kWidth, bool kVector> __global__ void __launch_bounds__(BlockLanes<kWidth>::kThreads)
    append_kernel(const __grid_constant__ AppendParams p) {
  using Lanes = BlockLanes<kWidth>;
  constexpr int kValues = Lanes::kValues;
  const Lanes lanes;
  const bool is_key = blockIdx.y == 0;
  const Half& half = p.halves[blockIdx.y];
  const int column = lanes.lane() * kValues;
  Lanes::for_each_block(p.blocks, [&](int64_t index) {
    float x[kValues] = {};
    int64_t target = -1;
    if (index < p.blocks) {
      const Block block = block_at(p, index);
      const int64_t slot = p.slots(block.token);
      load_values<T, kVector>(source_of<T, kWidth>(half, block) + column, x);
      target = target_of(p, block, slot);
      if (is_key && p.k_offsets && target >= 0) {
        float offset[kValues];
        load_values<Float16, kVector>(offset_of<kWidth>(p, block, slot) + column, offset);
#pragma unroll
        for (int i = 0; i < kValues; ++i) x[i] = ieee::sub(x[i], offset[i]);
      }
    }
    const auto [codes, norm] = lanes.encode(x);
    if (target >= 0) {
      store_codes<kVector>(half.codes + target * (kWidth / 2) + column / 2, codes);
      if (lanes.lane() == 0) half.norms[target] = norm;
    }
  });
}

// For many tokens: all groups of keys, then all of values. A group is one block of neighbouring tokens.
template <class T, int kBlockWidth, bool kOffsets> struct AppendJob : AppendParams {
  using Plan = BulkEncodePlan<T, kBlockWidth>;
  static constexpr bool kHasOffsets = kOffsets;
  int tokens;            // with those that the last group lacks below 2^31
  Divisor group_blocks;  // token_blocks
  int groups, half_groups;

  using Block = BlockOf<int>;
  struct Place {
    int half;
    Block block;  // of the first token
  };
  __device__ __forceinline__ Place place(int group) const {
    const int half = group >= half_groups, index = half ? group - half_groups : group;
    const int run = group_blocks.quotient(index), head = index - run * static_cast<int>(group_blocks.value);
    const int token = run * Plan::kBlocks;
    if (row_blocks == 1) return {half, {token, head, 0}};
    return {half, {token, head >> 1, head & 1}};
  }
  static __device__ __forceinline__ Block block_of(const Place& place, int own) {
    return {place.block.token + own, place.block.head, place.block.part};
  }
  __device__ __forceinline__ const Half& half(const Place& place) const { return halves[place.half]; }

  __device__ __forceinline__ bool lies_evenly() const { return true; }
  __device__ __forceinline__ EvenRows even_rows(const Place& place) const {
    constexpr auto kBytes = static_cast<int64_t>(sizeof(typename T::Storage));
    return {reinterpret_cast<const char*>(source_of<T, kBlockWidth>(half(place), place.block)),
            half(place).token_stride * kBytes, min_of(tokens - place.block.token, Plan::kBlocks)};
  }
  __device__ __forceinline__ const void* source(const Place& place, int own) const {
    const Block block = block_of(place, own);
    return block.token < tokens ? source_of<T, kBlockWidth>(half(place), block) : nullptr;
  }
  __device__ __forceinline__ void start_slot(const Place& place, int own, int64_t* to) const {
    const int token = place.block.token + own;
    if (token < tokens) slots.start_copy(token, to);
  }
  __device__ __forceinline__ int64_t target(const Place& place, int own, int64_t slot) const {
    const Block block = block_of(place, own);
    return block.token < tokens ? target_of(*this, block, slots.copied(slot)) : -1;
  }
  __device__ __forceinline__ uint8_t* codes(const Place& place) const { return half(place).codes; }
  __device__ __forceinline__ uint16_t* norms(const Place& place) const { return half(place).norms; }
  __device__ __forceinline__ const uint16_t* offsets(const Place& place, int own, int64_t slot) const {
    const Block block = block_of(place, own);
    const int64_t at = slots.copied(slot);
    if (place.half == 1 || block.token >= tokens || at < 0 || page_size.divide(at).quotient >= num_pages)
      return nullptr;
    return offset_of<kBlockWidth>(*this, block, at);
  }
};

// Whether every row can be read, and its codes written, in vectors of 16 bytes.
bool vectors_fit(const Tbq4AppendParams& p) {
  const AppendSource& s = p.source;
  const int64_t element = size_of(s.dtype);
  return widest_vector(address_bits(s.k, s.k_stride, element) | address_bits(s.v, s.v_stride, element) |
                       address_bits(p.k_codes) | address_bits(p.v_codes) |
                       address_bits(p.k_offsets, p.k_offsets_stride, 2)) == kVectorBytes;
}

// False: too few blocks, or no room.
template <class T, int kWidth, bool kOffsets>
bool append_in_bulk(const AppendParams& params, int64_t tokens, const Device& device, const Launch& launch) {
  using Job = AppendJob<T, kWidth, kOffsets>;
  constexpr int kTokens = Job::Plan::kBlocks;
  // Much of the last group may be missing.
  if (tokens < 4 * kTokens || tokens > INT32_MAX - kTokens) return false;
  const int64_t padded = params.blocks / tokens * round_up(tokens, kTokens);
  const int groups = bulk_groups(padded, kTokens, device);
  if (groups == 0) return false;
  const Job job{params, static_cast<int>(tokens), Divisor(params.blocks / tokens), 2 * groups, groups};
  return launch_bulk<bulk_encode_kernel<Job>>(job, device, launch);
}

}  // namespace

Status tbq4_append(const Tbq4AppendParams& p, const Launch& launch) {
  Device device;
  if (const Status status = enter(launch, device); !status.ok()) return status;
  const AppendSource& s = p.source;
  if (s.tokens == 0 || s.kv_heads == 0) return {};
  AppendParams params{};
  params.halves[0] = {s.k, s.k_stride[0], s.k_stride[1], p.k_codes, p.k_norms};
  params.halves[1] = {s.v, s.v_stride[0], s.v_stride[1], p.v_codes, p.v_norms};
  params.k_offsets = p.k_offsets;
  params.k_offsets_stride[0] = p.k_offsets_stride[0];
  params.k_offsets_stride[1] = p.k_offsets_stride[1];
  params.slots = {s.slots};
  params.num_pages = p.page_size == 0 ? 0 : p.num_pages;  // pages of no slots: every slot is out of range
  params.kv_heads = s.kv_heads;
  params.slot_count = params.num_pages * p.page_size;
  params.page_size = WideDivisor(max_of<int64_t>(p.page_size, 1));
  params.narrow_page = Divisor(max_of<int64_t>(p.page_size, 1));
  const auto stream = static_cast<cudaStream_t>(launch.stream);
  with_dtype(s.dtype, [&](auto t) {
    using T = decltype(t);
    with_width(s.head_dim, vectors_fit(p), [&](auto width, auto aligned) {
      constexpr int kWidth = width.value;
      params.row_blocks = static_cast<int>(s.head_dim) / kWidth;
      params.token_blocks = WideDivisor(s.kv_heads * params.row_blocks);
      params.blocks = s.tokens * s.kv_heads * params.row_blocks;
      params.narrow = params.slot_count <= INT32_MAX / (s.kv_heads * params.row_blocks);
      if constexpr (aligned.value != 0) {
        const bool done = params.k_offsets ? append_in_bulk<T, kWidth, true>(params, s.tokens, device, launch)
                                           : append_in_bulk<T, kWidth, false>(params, s.tokens, device, launch);
        if (done) return;
      }
      using Lanes = BlockLanes<kWidth>;
      const dim3 grid(Lanes::grid_of(params.blocks), 2);
      append_kernel<T, kWidth, aligned.value != 0><<<grid, Lanes::kThreads, 0, stream>>>(params);
    });
  });
  return launch_status();
}

}  // namespace flashq::cuda
