// Keys and values of the exact pool on their way into shared memory: rotated, and scaled to fp16 by a power of two for
// each row.
#pragma once
#include "cuda/ptx/fresh_thread.cuh"
#include "cuda/tbq4_attention/exact_tokens.cuh"
#include "cuda/tbq4_prefill/prepare_queries.cuh"

namespace flashq::cuda::tbq4_sm90 {

template <class C> class ExactRows {
 public:
  static constexpr int kLanes = C::kDim / 8,
                       kRows = 32 / kLanes;  // of a row; rows of a warp at a time

  // Of tile n of the keys, by warp `warp` of those that expand.
  __device__ __forceinline__ ExactRows(const Params& p, const Tile& tile, int n, int warp)
      : p_(p), tile_(tile), first_(n * C::kTileK), warp_(warp) {}

  // function(key of the tile, whether some row may read it) for this warp's keys. All lanes take part.
  template <class Function>
  __device__ __forceinline__ void for_each(const Function& function) const {
    const ExactKeys exact(p_, tile_);
    const int recent = exact.recent_begin(tile_.row >> p_.schedule.pack_log2);
#pragma unroll 1
    for (int base = warp_ * kRows; base < C::kTileK; base += C::kExpanders * kRows) {
      const int i = base + ptx::fresh_thread() % 32 / kLanes, key = first_ + i;
      function(i, key >= tile_.seen && key < tile_.kv_len && (key < exact.lead_end || key >= recent) &&
                      p_.call.kv.exact.holds(tile_.sequence, key));
    }
  }

  struct Row {
    HalfParts parts;  // this lane's eight values
    float unit;       // that the row is multiplied by
    bool poison;      // of values: this lane's block is NaN, and 0 here
  };
  __device__ __forceinline__ Row load_keys(int key, bool there) const {
    return load_row<false>(p_.call.kv.exact.k, p_.call.kv.exact.k_stride, key, there);
  }
  __device__ __forceinline__ Row load_values(int key, bool there) const {
    return load_row<true>(p_.call.kv.exact.v, p_.call.kv.exact.v_stride, key, there);
  }

  __device__ __forceinline__ void store_row(uint16_t (*tile)[C::kTileK][64], int key, const uint4& values) const {
    const int chunk = ptx::fresh_thread() % kLanes;
    store(reinterpret_cast<char*>(tile[chunk / 8][key]) + (chunk % 8 ^ key % 8) * 16, values);
  }

 private:
  template <bool kValues>
  __device__ __forceinline__ Row load_row(const void* data, const int64_t (&stride)[3], int key, bool there) const {
    const KvView& pool = p_.call.kv.exact;
    float x[8] = {};
    if (there) {
      const Quotient at = divide(first_ + key, pool.page_size);
      const int64_t page = pool.block_table(tile_.sequence, at.quotient);
      const auto* from = static_cast<const uint16_t*>(data) + page * stride[0] + at.remainder * stride[1] +
                         tile_.head / p_.schedule.packs_per_kv * stride[2] + ptx::fresh_thread() % kLanes * 8;
      const auto words = load_eight(from, true, p_.wide_exact);
      const bool half = p_.call.query.dtype == Dtype::kFloat16;
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const auto bits = static_cast<uint16_t>(words.value[i / 2] >> (16 * (i % 2)));
        x[i] = half ? half_to_float(bits) : bfloat_to_float(bits);
      }
    }
    bool poison = false;
    if constexpr (kValues) {
      float product = 0;  // of what is not finite: NaN
#pragma unroll
      for (const float y : x) product = fmaf(y, 0.f, product);
      poison = reduce_lanes<C::kWidth / 8>(product, [](float a, float b) { return a + b; }) != 0;
#pragma unroll
      for (float& y : x) y = poison ? 0 : y;
    }
    BlockLanes<C::kWidth>().template rotate<false>(x);
    const FloatUnit scaled(reduce_lanes<kLanes>(largest_of(x), larger));
    return {split_halves(x, scaled.inverse), scaled.unit, poison};
  }

  const Params& p_;
  const Tile& tile_;
  int first_, warp_;
};

}  // namespace flashq::cuda::tbq4_sm90
