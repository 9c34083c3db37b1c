// tbq4_page_offsets_: the key offsets of the pages that an append opens.
//
// A block serves one head of a sequence; in most decode steps no page is opened and it ends after four loads. Otherwise
// lanes bring keys, raw or decoded, to shared memory, many at a time, and thread d sums element d in the order of
// positions: the format fixes the bits, so the sum cannot be a tree.
#include <cuda_runtime_api.h>

#include "core/tbq4/page_offsets.h"
#include "cuda/kernels.h"
#include "cuda/launch.h"
#include "cuda/sequences.cuh"
#include "cuda/tbq4/lanes.cuh"
#include "cuda/tbq4/rows.cuh"

namespace flashq::cuda {
namespace {

constexpr int kThreads = 256;  // at least head_dim
constexpr int kTileKeys = 32;  // in shared memory at a time

template <class T, int kWidth, bool kVector> class OffsetBlock {
 public:
  static constexpr int kMaxDim = kWidth == 64 ? 64 : 256;
  struct Shared {
    float keys[kTileKeys][kMaxDim];
    bool available[kTileKeys];
  };

  __device__ OffsetBlock(const PageOffsetsParams& p, Shared& shared, int64_t sequence, int64_t head)
      : p_(p), shared_(shared), sequence_(sequence), head_(head) {}

  __device__ void run() {
    // Where the keys begin takes a scan if earlier offsets are out of range. From the one before alone, a sequence has
    // at least as many new keys and opens at least as many pages: mostly none.
    set_rows(sequence_ == 0 ? 0 : clamp(p_.cu_seqlens(sequence_), 0, p_.tokens));
    if (rule_.opened_pages().empty()) return;
    set_rows(packed_begin(p_.cu_seqlens, sequence_, p_.tokens));
    const KeyRange pages = rule_.opened_pages();
    for (int64_t i = pages.begin + blockIdx.y; i < pages.end; i += gridDim.y) {
      const int64_t page = p_.block_table(sequence_, i);
      if (page < 0 || page >= p_.num_pages) continue;
      tbq4::OffsetMean mean;
      if (rule_.fills(i) || !add_keys(rule_.before(i), mean)) add_keys(rule_.own(i), mean);
      const auto d = static_cast<int>(threadIdx.x);
      if (d < p_.head_dim)
        p_.k_offsets[page * p_.k_offsets_stride[0] + head_ * p_.k_offsets_stride[1] + d] = mean.value();
    }
  }

 private:
  using Storage = typename T::Storage;
  using Lanes = BlockLanes<kWidth>;
  static constexpr int kValues = Lanes::kValues;

  // The sequence's new keys are rows of k from `first` on.
  __device__ void set_rows(int64_t first) {
    const int64_t length = clamp(p_.seqlens(sequence_), 0, capacity_of(p_.max_pages, p_.page_size));
    const int64_t added = clamp(p_.cu_seqlens(sequence_ + 1), first, p_.tokens) - first;
    first_row_ = first;
    rule_ = {length - min_of(added, length), length, p_.kv_start.given() ? clamp(p_.kv_start(sequence_), 0, length) : 0,
             p_.page_size};
  }

  // Thread d adds element d of the keys. Returns whether any was available, to all threads.
  __device__ bool add_keys(KeyRange keys, tbq4::OffsetMean& mean) {
    const int row_blocks = static_cast<int>(p_.head_dim) / kWidth;  // 1 or 2
    const int key_lanes = Lanes::kLanes * row_blocks, in_flight = kThreads / key_lanes;
    const int own_key = static_cast<int>(threadIdx.x) / key_lanes;
    const int part = static_cast<int>(threadIdx.x) % key_lanes / Lanes::kLanes;
    const int column = part * kWidth + lanes_.lane() * kValues;
    bool any = false;
    for (int64_t base = keys.begin; base < keys.end; base += kTileKeys) {
      const int count = static_cast<int>(min_of<int64_t>(kTileKeys, keys.end - base));
      bool found = false;
      for (int first = 0; first < count; first += in_flight) {
        const int at = first + own_key;
        float x[kValues] = {};
        const bool here = load_key(base + at, at < count, part, column, x);
        if (at >= count) continue;
        found |= here;
        shared_.available[at] = here;
#pragma unroll
        for (int i = 0; i < kValues; ++i) shared_.keys[at][column + i] = x[i];
      }
      any |= __syncthreads_or(found) != 0;
      if (threadIdx.x < p_.head_dim)
        for (int at = 0; at < count; ++at)
          if (shared_.available[at]) mean.add(shared_.keys[at][threadIdx.x]);
      __syncthreads();
    }
    return any;
  }

  // This lane's values of a key: from this append, else exact where it is held, else decoded. Whole warps call it.
  __device__ bool load_key(int64_t token, bool wanted, int part, int column, float (&x)[kValues]) const {
    bool coded = false;
    uint32_t codes = 0;
    uint16_t norm = 0;
    const uint16_t* offsets = nullptr;
    if (wanted && token >= rule_.start) {
      const int64_t row = first_row_ + token - rule_.start;
      load_values<T, kVector>(static_cast<const Storage*>(p_.k) + row * p_.k_stride[0] + head_ * p_.k_stride[1] +
                                  column,
                              x);
    } else if (wanted && p_.exact.k && p_.exact.holds(sequence_, token)) {
      const KvView& pool = p_.exact;
      const auto [entry, slot] = divide(token, pool.page_size);
      load_values<T, kVector>(static_cast<const Storage*>(pool.k) +
                                  pool.block_table(sequence_, entry) * pool.k_stride[0] + slot * pool.k_stride[1] +
                                  head_ * pool.k_stride[2] + column,
                              x);
    } else if (wanted) {
      const auto [entry, slot] = divide(token, p_.page_size);
      const int64_t page = p_.block_table(sequence_, entry);
      wanted = coded = page >= 0 && page < p_.num_pages;
      if (coded) {
        const int64_t block = ((page * p_.kv_heads + head_) * p_.page_size + slot) * (p_.head_dim / kWidth) + part;
        codes = load_codes<kVector>(p_.k_codes + block * (kWidth / 2) + lanes_.lane() * (kValues / 2));
        norm = p_.k_norms[block];
        offsets = p_.k_offsets + page * p_.k_offsets_stride[0] + head_ * p_.k_offsets_stride[1] + column;
      }
    }
    if (__any_sync(kWholeWarp, coded)) {
      float decoded[kValues], offset[kValues];
      lanes_.decode(codes, norm, decoded);
      if (coded) {
        load_values<Float16, kVector>(offsets, offset);
#pragma unroll
        for (int i = 0; i < kValues; ++i) x[i] = ieee::add(decoded[i], offset[i]);
      }
    }
    return wanted;
  }

  const PageOffsetsParams& p_;
  Shared& shared_;
  const Lanes lanes_;
  const int64_t sequence_, head_;
  int64_t first_row_;
  tbq4::OffsetRule rule_;
};

template <class T, int kWidth, bool kVector> __global__ void __launch_bounds__(kThreads)
    page_offsets_kernel(const __grid_constant__ PageOffsetsParams p) {
  using Block = OffsetBlock<T, kWidth, kVector>;
  __shared__ typename Block::Shared shared;
  for (int64_t i = blockIdx.x; i < p.batch * p.kv_heads; i += gridDim.x) {
    const Quotient at = divide(i, p.kv_heads);
    Block(p, shared, at.quotient, at.remainder).run();
  }
}

// Whether keys and offsets can be read in vectors of 16 bytes, and codes in those of 4.
bool vectors_fit(const PageOffsetsParams& p) {
  const int64_t element = p.dtype == Dtype::kFloat32 ? 4 : 2;
  return widest_vector(address_bits(p.k, p.k_stride, element) | address_bits(p.exact.k, p.exact.k_stride, element) |
                       address_bits(p.k_offsets, p.k_offsets_stride, 2) | address_bits(p.k_codes) * 4) == kVectorBytes;
}

}  // namespace

Status tbq4_page_offsets(const PageOffsetsParams& p, const Launch& launch) {
  if (const Status status = enter(launch); !status.ok()) return status;
  if (p.tokens == 0 || p.batch == 0 || p.kv_heads == 0) return {};
  constexpr int64_t kMaxGridX = INT32_MAX, kMaxGridY = 65535;
  // As many blocks a sequence as it opens pages on average: one in a decode step, all at work for a long prompt.
  const int64_t splits = clamp(ceil_div(p.tokens, p.page_size) / p.batch, 1, kMaxGridY);
  const dim3 grid(static_cast<unsigned>(min_of(p.batch * p.kv_heads, kMaxGridX)), static_cast<unsigned>(splits));
  const auto stream = static_cast<cudaStream_t>(launch.stream);
  with_dtype(p.dtype, [&](auto t) {
    using T = decltype(t);
    with_width(p.head_dim, vectors_fit(p), [&](auto width, auto aligned) {
      page_offsets_kernel<T, width.value, aligned.value != 0><<<grid, kThreads, 0, stream>>>(p);
    });
  });
  return launch_status();
}

}  // namespace flashq::cuda
