// tbq4_page_offsets_: the key offsets of the pages that an append opens.
//
// A block serves one block of the codec of one head of a sequence; in most decode steps no page is opened and it ends
// after a few loads. Pages that the append fills, all but the last of a prompt, each go to a warp, whose lanes add
// elements straight from memory. For a page that it only begins, lanes bring the keys before it to shared memory, all
// on their way at once, and thread d sums element d. The format fixes the order of the sums, so none of them is a tree.
#include <cuda_runtime_api.h>

#include "core/tbq4/codec.h"
#include "core/tbq4/page_offsets.h"
#include "cuda/kernels.h"
#include "cuda/launch.h"
#include "cuda/overlapping_launch.h"
#include "cuda/ptx/dependent_launch.cuh"
#include "cuda/sequences.cuh"
#include "cuda/tbq4/lanes.cuh"
#include "cuda/tbq4/rows.cuh"

namespace flashq::cuda {
namespace {

constexpr int kThreads = 128, kWarps = kThreads / 32;
constexpr int kTileKeys = 64;  // before a page, that a block decodes
static_assert(kTileKeys == tbq4::kOffsetWindow);

struct OffsetsParams : PageOffsetsParams {
  int64_t capacity;              // of the block table, in tokens
  WideDivisor page, exact_page;  // divide by the pages' sizes
  WideDivisor head_blocks, row_blocks;
};

template <class T, int kWidth, bool kVector> class OffsetBlock {
 public:
  static constexpr int kBlocks = sizeof(typename T::Storage) == 4 ? 3 : 4;  // of a multiprocessor

 private:
  using Storage = typename T::Storage;
  using Lanes = BlockLanes<kWidth>;
  static constexpr int kValues = Lanes::kValues, kKeys = kThreads / Lanes::kLanes;  // that load at once
  static constexpr int kLoads = kTileKeys / kKeys;
  // Earlier keys are summed in two passes, so that four blocks fit in a multiprocessor.
  static constexpr int kPasses = 2, kPassKeys = kTileKeys / kPasses, kPassLoads = kLoads / kPasses;
  static constexpr int kOffsetWords = kValues / 2;         // of a lane
  static constexpr int kOwn = kWidth / 32, kOwnKeys = 16;  // what a lane adds of a page's own keys, so many at a time

  // Where a key before a page lies, from the block's first column on. row: null if it is not available; of coded keys
  // the page's offsets.
  struct EarlierKey {
    const void* row;
    const uint8_t* codes;
    const uint16_t* norm;
  };

  // In shared memory: held in registers by every thread it would leave too few for the keys.
  struct Task {
    int64_t sequence, head;
    int first_column;  // of the block's values in a row
    int64_t first_row;
    tbq4::OffsetRule rule;
  };

 public:
  struct Shared {
    alignas(kVectorBytes) float decoded[kPassKeys * kWidth];
    EarlierKey earlier[kTileKeys];
    bool available[kTileKeys];
    Task task;
  };

  __device__ OffsetBlock(const OffsetsParams& p, Shared& shared) : p_(p), shared_(shared), task_(shared.task) {}

  __device__ void run(int64_t index) {
    const Quotient at = p_.head_blocks.divide(index), row = p_.row_blocks.divide(at.remainder);
    const int64_t b = at.quotient;
    // Loaded before anything waits for one of them.
    const int64_t begin = p_.cu_seqlens(b), end = p_.cu_seqlens(b + 1), seqlen = p_.seqlens(b);
    const int64_t kv_start = p_.kv_start.given() ? p_.kv_start(b) : 0;
    Task task{b, row.quotient, static_cast<int>(row.remainder) * kWidth, 0, {}};
    // The sequence's new keys are rows of k from `first` on.
    const auto set_rows = [&](int64_t first) {
      const int64_t length = clamp(seqlen, 0, p_.capacity), added = clamp(end, first, p_.tokens) - first;
      task.first_row = first;
      task.rule = {length - min_of(added, length), length, clamp(kv_start, 0, length), p_.page_size};
    };
    // Where the keys begin takes a scan if earlier offsets are out of range. From the one before alone, a sequence has
    // at least as many new keys and opens at least as many pages: mostly none.
    set_rows(b == 0 ? 0 : clamp(begin, 0, p_.tokens));
    if (opened_pages(task).empty()) return;
    set_rows(packed_begin(p_.cu_seqlens, b, p_.tokens));
    const KeyRange pages = opened_pages(task);
    if (pages.empty()) return;
    __syncthreads();
    if (threadIdx.x == 0) task_ = task;
    __syncthreads();
    const int64_t last = pages.end - 1, filled = task.rule.fills(last) ? pages.end : last;
    const int64_t worker = int64_t{blockIdx.y} * kWarps + static_cast<int>(threadIdx.x) / 32;
    for (int64_t i = pages.begin + worker; i < filled; i += int64_t{gridDim.y} * kWarps) fix_by_own(i);
    if (filled == pages.end || blockIdx.y != 0) return;
    const int64_t page = p_.block_table(b, last);  // no key waits for it
    tbq4::OffsetMean mean;
    if (add_earlier(task_.rule.before(last), mean)) {
      const auto d = static_cast<int>(threadIdx.x);
      if (d < kWidth && page >= 0 && page < p_.num_pages) offsets_of(page)[d] = mean.value();
    } else if (threadIdx.x < 32) {
      fix_by_own(last);
    }
  }

 private:
  // In the order of i: the first of a word overwrites it.
  template <class U, int kCount>
  static __device__ __forceinline__ void set_bits(Packed<U, kCount>& row, int i, typename U::Storage x) {
    if constexpr (sizeof x == 4) {
      row.words.value[i] = bits_of(x);
    } else {
      uint32_t& word = row.words.value[i / 2];
      word = i % 2 ? word | uint32_t{x} << 16 : x;
    }
  }
  // A lane's values of a row, as they lie in memory.
  template <class U> static __device__ __forceinline__ Packed<U, kValues> load_row(const typename U::Storage* from) {
    Packed<U, kValues> row;
    if constexpr (kVector) {
#pragma unroll
      for (int i = 0; i < static_cast<int>(sizeof(row)) / kVectorBytes; ++i) {
        const auto words = load<Vector<uint32_t, 4>>(from + i * (kVectorBytes / sizeof(typename U::Storage)));
#pragma unroll
        for (int j = 0; j < 4; ++j) row.words.value[4 * i + j] = words.value[j];
      }
    } else {
#pragma unroll
      for (int i = 0; i < kValues; ++i) set_bits(row, i, from[i]);
    }
    return row;
  }

  __device__ __forceinline__ KeyRange opened_pages(const Task& task) const {
    return task.rule.opened_pages([&](int64_t token) { return p_.page.divide(token).quotient; });
  }

  __device__ __forceinline__ const Storage* new_key(int64_t token) const {
    return static_cast<const Storage*>(p_.k) + (task_.first_row + token - task_.rule.start) * p_.k_stride[0] +
           task_.head * p_.k_stride[1] + task_.first_column;
  }
  __device__ __forceinline__ uint16_t* offsets_of(int64_t page) const {
    return p_.k_offsets + page * p_.k_offsets_stride[0] + task_.head * p_.k_offsets_stride[1] + task_.first_column;
  }
  // Which of a tile's keys this lane loads as number `load`.
  static __device__ __forceinline__ int own_key(int load) {
    return load * kKeys + static_cast<int>(threadIdx.x) / Lanes::kLanes;
  }

  // Thread d adds element d of `count` keys in shared memory. Mostly all of it is finite: then so is the sum, and no
  // key has to be looked at.
  static __device__ __forceinline__ void add_column(int count, const float* column, const bool* available,
                                                    tbq4::OffsetMean& mean) {
    float sum = mean.sum;
    int keys = 0;
#pragma unroll 8
    for (int at = 0; at < count; ++at) {
      sum = ieee::add(sum, column[at * kWidth]);
      keys += available[at];
    }
    if (tbq4::is_finite(sum)) {
      mean.sum = sum;
      mean.count += keys;
      return;
    }
#pragma unroll 1
    for (int at = 0; at < count; ++at)
      if (available[at]) mean.add(column[at * kWidth]);
  }

  // A warp's: the offset of a page from its own keys, all of this append.
  __device__ void fix_by_own(int64_t entry) const {
    const KeyRange keys = task_.rule.own(entry);
    const int column = static_cast<int>(threadIdx.x) % 32 * kOwn;
    const int64_t page = p_.block_table(task_.sequence, entry), stride = p_.k_stride[0];
    const Storage* from = new_key(keys.begin) + column;
    tbq4::OffsetMean mean[kOwn];
    for (int64_t left = keys.size(); left > 0; left -= kOwnKeys, from += kOwnKeys * stride) {
      const int count = static_cast<int>(min_of<int64_t>(left, kOwnKeys));
      Packed<T, kOwn> rows[kOwnKeys];
#pragma unroll
      for (int i = 0; i < kOwnKeys; ++i) {
        rows[i] = {};
        if (i < count) rows[i] = load_part(from + i * stride);
      }
      float sum[kOwn];
      bool finite = true;
#pragma unroll
      for (int j = 0; j < kOwn; ++j) {
        sum[j] = mean[j].sum;
#pragma unroll
        for (int i = 0; i < kOwnKeys; ++i)
          sum[j] = ieee::add(sum[j], rows[i].get(j));  // of no key +0, which adds nothing
        finite &= tbq4::is_finite(sum[j]);
      }
      if (finite) {  // and so is every key
#pragma unroll
        for (int j = 0; j < kOwn; ++j) mean[j] = {sum[j], mean[j].count + count};
        continue;
      }
#pragma unroll 1
      for (int i = 0; i < count; ++i) {
        const Packed<T, kOwn> row = load_part(from + i * stride);
#pragma unroll
        for (int j = 0; j < kOwn; ++j) mean[j].add(row.get(j));
      }
    }
    if (page < 0 || page >= p_.num_pages) return;
#pragma unroll
    for (int j = 0; j < kOwn; ++j) offsets_of(page)[column + j] = mean[j].value();
  }
  static __device__ __forceinline__ Packed<T, kOwn> load_part(const Storage* from) {
    if constexpr (kVector) {
      return load<Packed<T, kOwn>>(from);
    } else {
      Packed<T, kOwn> part;
#pragma unroll
      for (int i = 0; i < kOwn; ++i) set_bits(part, i, from[i]);
      return part;
    }
  }

  // Keys before a page: from this append, else exact where they are held, else decoded; at most a tile. Returns whether
  // any was available, to all threads.
  __device__ bool add_earlier(KeyRange keys, tbq4::OffsetMean& mean) {
    if (keys.empty()) return false;
    const auto d = static_cast<int>(threadIdx.x), count = static_cast<int>(keys.size());
    bool found = false;
    if (d < kTileKeys) {
      const EarlierKey key = d < count ? find_earlier(keys.begin + d) : EarlierKey{};
      found = key.row;
      shared_.earlier[d] = key;
      shared_.available[d] = found;
    }
    if (!__syncthreads_or(found)) return false;
    Packed<T, kValues> rows[kLoads];  // of coded keys, offsets
    uint32_t codes[kLoads];
    uint16_t norms[kLoads];
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      const EarlierKey key = shared_.earlier[own_key(i)];
      rows[i] = {};
      codes[i] = norms[i] = 0;
      if (key.codes) {
        codes[i] = load_codes<kVector>(key.codes + lanes_.lane() * (kValues / 2));
        norms[i] = *key.norm;
        const auto offsets = load_row<Float16>(static_cast<const uint16_t*>(key.row) + lanes_.lane() * kValues);
#pragma unroll
        for (int j = 0; j < kOffsetWords; ++j) rows[i].words.value[j] = offsets.words.value[j];
      } else if (key.row) {
        rows[i] = load_row<T>(static_cast<const Storage*>(key.row) + lanes_.lane() * kValues);
      }
    }
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
#pragma unroll
      for (int i = pass * kPassLoads; i < (pass + 1) * kPassLoads; ++i) {
        float x[kValues];
#pragma unroll
        for (int j = 0; j < kValues; ++j) x[j] = rows[i].get(j);
        const bool coded = shared_.earlier[own_key(i)].codes;
        if (__any_sync(kWholeWarp, coded)) {
          float decoded[kValues];
          lanes_.decode(codes[i], norms[i], decoded);
          Packed<Float16, kValues> offsets;
#pragma unroll
          for (int j = 0; j < kOffsetWords; ++j) offsets.words.value[j] = rows[i].words.value[j];
#pragma unroll
          for (int j = 0; j < kValues; ++j)
            if (coded) x[j] = ieee::add(decoded[j], offsets.get(j));
        }
        float* const to = shared_.decoded + (own_key(i) - pass * kPassKeys) * kWidth + lanes_.lane() * kValues;
#pragma unroll
        for (int j = 0; j < kValues; j += 4) store(to + j, make_float4(x[j], x[j + 1], x[j + 2], x[j + 3]));
      }
      __syncthreads();
      if (d < kWidth)
        add_column(min_of(count - pass * kPassKeys, kPassKeys), shared_.decoded + d,
                   shared_.available + pass * kPassKeys, mean);
      __syncthreads();
    }
    return true;
  }

  __device__ EarlierKey find_earlier(int64_t token) const {
    if (token >= task_.rule.start) return {new_key(token), nullptr, nullptr};
    const Quotient at = p_.page.divide(token);
    const int64_t page = p_.block_table(task_.sequence, at.quotient);
    if (const Storage* const exact = p_.exact.k ? exact_key(token) : nullptr) return {exact, nullptr, nullptr};
    if (page < 0 || page >= p_.num_pages) return {};
    const int64_t block = ((page * p_.kv_heads + task_.head) * p_.page_size + at.remainder) * p_.row_blocks.value() +
                          task_.first_column / kWidth;
    return {offsets_of(page), p_.k_codes + block * (kWidth / 2), p_.k_norms + block};
  }

  // A key in the exact pool, or null where it is not held.
  __device__ __forceinline__ const Storage* exact_key(int64_t token) const {
    const KvView& pool = p_.exact;
    const Quotient at = p_.exact_page.divide(token);
    if (pool.page_size == 0 || at.quotient >= pool.max_pages) return nullptr;
    const int64_t page = pool.block_table(task_.sequence, at.quotient);
    if (page < 0 || page >= pool.num_pages) return nullptr;
    return static_cast<const Storage*>(pool.k) + page * pool.k_stride[0] + at.remainder * pool.k_stride[1] +
           task_.head * pool.k_stride[2] + task_.first_column;
  }

  const OffsetsParams& p_;
  Shared& shared_;
  Task& task_;
  const Lanes lanes_;
};

template <class T, int kWidth, bool kVector> __global__ void __launch_bounds__(kThreads,
                                                                               OffsetBlock<T, kWidth, kVector>::kBlocks)
    page_offsets_kernel(const __grid_constant__ OffsetsParams p) {
  using Block = OffsetBlock<T, kWidth, kVector>;
  __shared__ typename Block::Shared shared;
  ptx::allow_dependents();
  ptx::wait_for_primary();
  for (int64_t i = blockIdx.x; i < p.batch * p.head_blocks.value(); i += gridDim.x) Block(p, shared).run(i);
}

// Whether keys and offsets can be read in vectors of 16 bytes, and codes in those of 4.
bool vectors_fit(const PageOffsetsParams& p) {
  const int64_t element = size_of(p.dtype);
  return widest_vector(address_bits(p.k, p.k_stride, element) | address_bits(p.exact.k, p.exact.k_stride, element) |
                       address_bits(p.k_offsets, p.k_offsets_stride, 2) | address_bits(p.k_codes) * 4) == kVectorBytes;
}

}  // namespace

Status tbq4_page_offsets(const PageOffsetsParams& p, const Launch& launch) {
  Device device;
  if (const Status status = enter(launch, device); !status.ok()) return status;
  if (p.tokens == 0 || p.batch == 0 || p.kv_heads == 0) return {};
  constexpr int64_t kMaxGridX = INT32_MAX, kMaxGridY = 65535;
  // As many warps a sequence as it opens pages on average: one block in a decode step, all at work for a long prompt.
  const int64_t splits = clamp(ceil_div(p.tokens / p.batch, p.page_size * kWarps), 1, kMaxGridY);
  with_dtype(p.dtype, [&](auto t) {
    using T = decltype(t);
    with_width(p.head_dim, vectors_fit(p), [&](auto width, auto aligned) {
      const int64_t row_blocks = p.head_dim / width.value;
      const OffsetsParams params{p,
                                 capacity_of(p.max_pages, p.page_size),
                                 WideDivisor(p.page_size),
                                 WideDivisor(max_of<int64_t>(p.exact.page_size, 1)),
                                 WideDivisor(p.kv_heads * row_blocks),
                                 WideDivisor(row_blocks)};
      const dim3 grid(static_cast<unsigned>(min_of(p.batch * p.kv_heads * row_blocks, kMaxGridX)),
                      static_cast<unsigned>(splits));
      launch_overlapping(page_offsets_kernel<T, width.value, aligned.value != 0>, grid, kThreads, 0, device, launch,
                         params);
    });
  });
  return launch_status();
}

}  // namespace flashq::cuda
