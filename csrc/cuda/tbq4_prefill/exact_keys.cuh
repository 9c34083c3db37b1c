// Keys and values of the exact pool on their way into shared memory: rotated, and scaled to fp16 by a power of two for
// each row.
#pragma once
#include "cuda/ptx/fresh_thread.cuh"
#include "cuda/tbq4_attention/offsets.cuh"
#include "cuda/tbq4_prefill/prepare_queries.cuh"

namespace flashq::cuda::tbq4_sm90 {

template <class C> class ExactRows {
 public:
  static constexpr int kLanes = C::kDim / 8,
                       kRows = 32 / kLanes;  // of a row; rows of a warp at a time

  // Of tile n of the keys, by warp `warp` of those that expand. Each lane looks up one of the warp's keys.
  __device__ __forceinline__ ExactRows(const Params& p, const Tile& tile, int n, int warp)
      : p_(p), head_(tile.head / p.schedule.packs_per_kv), warp_(warp) {
    static_assert((C::kTileK / kRows + C::kExpanders - 1) / C::kExpanders * kRows <= 32);
    const int lane = ptx::fresh_lane(), i = (lane / kRows * C::kExpanders + warp) * kRows + lane % kRows,
              key = n * C::kTileK + i;
    const ExactKeys exact(p, tile);
    if (i < C::kTileK && key >= tile.seen && key < tile.kv_len &&
        (key < exact.lead_end || key >= exact.recent_begin(tile.row >> p.schedule.pack_log2)))
      place_ = find_in_pool(p, tile, key);
    __syncwarp();
  }

  struct Row {
    HalfParts parts;  // this lane's eight values
    float unit;       // that the row is multiplied by
    bool poison;      // of values: this lane's block is NaN, and 0 here
  };
  // function(key of the tile, its row; zeros if nobody reads it) for this warp's keys. All lanes take part.
  __device__ __forceinline__ void for_each_key(const auto& function) const {
    for_each<false>(p_.call.kv.exact.k, p_.call.kv.exact.k_stride, function);
  }
  __device__ __forceinline__ void for_each_value(const auto& function) const {
    for_each<true>(p_.call.kv.exact.v, p_.call.kv.exact.v_stride, function);
  }

  __device__ __forceinline__ void store_row(uint16_t (*tile)[C::kTileK][64], int key, const uint4& values) const {
    const int chunk = ptx::fresh_thread() % kLanes;
    store(reinterpret_cast<char*>(tile[chunk / 8][key]) + (chunk % 8 ^ key % 8) * 16, values);
  }

 private:
  using Words = Vector<uint32_t, 4>;

  template <bool kValues>
  __device__ __forceinline__ void for_each(const void* data, const int64_t (&stride)[3], const auto& function) const {
    constexpr int kStep = C::kExpanders * kRows, kAhead = 3;  // a row takes less time than a load
    const auto load_row = [&](int n) {
      return warp_ * kRows + n * kStep < C::kTileK ? load_words(data, stride, n) : Words{};
    };
    Words next[kAhead];
#pragma unroll
    for (int i = 0; i < kAhead; ++i) next[i] = load_row(i);
#pragma unroll 1
    for (int base = warp_ * kRows, n = kAhead; base < C::kTileK; base += kStep, ++n) {
      const Words words = next[0];
#pragma unroll
      for (int i = 1; i < kAhead; ++i) next[i - 1] = next[i];
      next[kAhead - 1] = load_row(n);
      function(base + ptx::fresh_lane() / kLanes, finish_row<kValues>(words));
    }
  }
  // This lane's eight values of the n-th of the rows that it takes part in.
  __device__ __forceinline__ Words load_words(const void* data, const int64_t (&stride)[3], int n) const {
    const int lane = ptx::fresh_lane(), source = n * kRows + lane / kLanes;
    const int64_t page = __shfl_sync(~0u, place_.page, source);
    const int slot = __shfl_sync(~0u, place_.slot, source);
    const auto* const from = static_cast<const uint16_t*>(data) + page * stride[0] + slot * stride[1] +
                             head_ * stride[2] + lane % kLanes * 8;
    return load_eight(from, page >= 0, p_.wide_exact);
  }
  template <bool kValues> __device__ __forceinline__ Row finish_row(const Words& words) const {
    const bool half = p_.call.query.dtype == Dtype::kFloat16;
    float x[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const auto bits = static_cast<uint16_t>(words.value[i / 2] >> (16 * (i % 2)));
      x[i] = half ? half_to_float(bits) : bfloat_to_float(bits);
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
  const int head_, warp_;
  PoolPlace place_{-1, 0};
};

}  // namespace flashq::cuda::tbq4_sm90
