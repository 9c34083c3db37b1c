// Rows of a tensor of any strides, and the values of one lane in 16-byte pieces or one by one.
#pragma once
#include "core/half.h"
#include "cuda/vector.cuh"
#include "cuda/wide_divisor.cuh"
#include "params.h"

namespace flashq::cuda {

// A RowsView for kernels. Neighbouring dimensions are merged where their strides allow it: each left costs a division a
// row.
class Rows {
 public:
  Rows() = default;
  Rows(const RowsView& view, int64_t element_bytes) : data_(view.data) {
    int64_t size[kMaxLeading];
    for (int d = 0; d < view.leading; ++d) {
      if (view.size[d] == 1) continue;
      const int last = dimensions_ - 1;
      if (last >= 0 && stride_[last] == view.size[d] * view.stride[d]) {
        size[last] *= view.size[d];
        stride_[last] = view.stride[d];
      } else {
        size[dimensions_] = view.size[d];
        stride_[dimensions_++] = view.stride[d];
      }
    }
    for (int d = 0; d < dimensions_; ++d) size_[d] = WideDivisor(size[d]);
    address_bits_ = address_bits(data_, stride_, element_bytes);
  }

  // Whether every row starts at a multiple of `bytes`.
  [[nodiscard]] bool aligned(int bytes) const { return address_bits_ % static_cast<uintptr_t>(bytes) == 0; }

  FLASHQ_HD const void* data() const { return data_; }
  // Elements from one block of rows to the next, or -1 where they do not lie evenly; a block is `width` elements, a row
  // `row_blocks` blocks.
  [[nodiscard]] int64_t even_stride(int width, int row_blocks) const {
    if (dimensions_ > 1) return -1;
    if (row_blocks == 1) return stride_[0];
    return stride_[0] == int64_t{width} * row_blocks ? width : -1;
  }

  template <class Storage> __device__ __forceinline__ const Storage* row(int64_t index) const {
    int64_t offset = 0;
#pragma unroll 1
    for (int d = dimensions_ - 1; d > 0; --d) {
      const Quotient at = size_[d].divide(index);
      offset += at.remainder * stride_[d];
      index = at.quotient;
    }
    if (dimensions_ > 0) offset += index * stride_[0];
    return static_cast<const Storage*>(data_) + offset;
  }

 private:
  const void* data_ = nullptr;
  int dimensions_ = 0;
  uintptr_t address_bits_ = 0;
  WideDivisor size_[kMaxLeading];
  int64_t stride_[kMaxLeading] = {};
};

// Where a block lies: its row, and its first element there. Rows of 256 values have two blocks, others one.
struct BlockPlace {
  int64_t row;
  int column;
};
template <int kWidth> __device__ __forceinline__ BlockPlace place_of(int64_t block, int row_blocks) {
  return row_blocks == 1 ? BlockPlace{block, 0} : BlockPlace{block >> 1, static_cast<int>(block & 1) * kWidth};
}

// kValues values at `from`, which is aligned to 16 bytes where kVector says so.
template <class T, bool kVector, int kValues>
__device__ __forceinline__ void load_values(const typename T::Storage* from, float (&x)[kValues]) {
  constexpr int kPiece = kVector ? kVectorBytes / static_cast<int>(sizeof(typename T::Storage)) : 1;
#pragma unroll
  for (int i = 0; i < kValues; i += kPiece) {
    const auto piece = load<Packed<T, kPiece>>(from + i);
#pragma unroll
    for (int j = 0; j < kPiece; ++j) x[i + j] = piece.get(j);
  }
}

template <class T, int kValues>
__device__ __forceinline__ void store_values(const float (&x)[kValues], typename T::Storage* to) {
  constexpr int kPiece = kVectorBytes / static_cast<int>(sizeof(typename T::Storage));
#pragma unroll
  for (int i = 0; i < kValues; i += kPiece) {
    Packed<T, kPiece> piece;
#pragma unroll
    for (int j = 0; j < kPiece; ++j) piece.set(j, x[i + j]);
    store_global(to + i, piece);
  }
}

// Eight codes, lowest nibble first.
template <bool kVector> __device__ __forceinline__ uint32_t load_codes(const uint8_t* from) {
  if constexpr (kVector) return load<uint32_t>(from);
  uint32_t codes = 0;
#pragma unroll
  for (int i = 0; i < 4; ++i) codes |= static_cast<uint32_t>(from[i]) << (8 * i);
  return codes;
}
template <bool kVector> __device__ __forceinline__ void store_codes(uint8_t* to, uint32_t codes) {
  if constexpr (kVector) {
    store(to, codes);
  } else {
#pragma unroll
    for (int i = 0; i < 4; ++i) to[i] = static_cast<uint8_t>(codes >> (8 * i));
  }
}

// Calls function(Float32{}), (Float16{}) or (Bfloat16{}).
template <class Function> void with_dtype(Dtype dtype, const Function& function) {
  switch (dtype) {
    case Dtype::kFloat32: function(Float32{}); break;
    case Dtype::kFloat16: function(Float16{}); break;
    case Dtype::kBfloat16: function(Bfloat16{}); break;
  }
}

template <int kValue> struct Constant { static constexpr int value = kValue; };

// Calls function(Constant<width>{}, Constant<0 or 1>{}), a block width and a flag as constants.
template <class Function> void with_width(int64_t head_dim, bool flag, const Function& function) {
  if (head_dim == 64) {
    flag ? function(Constant<64>{}, Constant<1>{}) : function(Constant<64>{}, Constant<0>{});
  } else {
    flag ? function(Constant<128>{}, Constant<1>{}) : function(Constant<128>{}, Constant<0>{});
  }
}

}  // namespace flashq::cuda
