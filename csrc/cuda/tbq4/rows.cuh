// Rows of a tensor of any strides, and the values of one lane in 16-byte pieces or one by one.
#pragma once
#include "core/half.h"
#include "cuda/vector.cuh"
#include "params.h"

namespace flashq::cuda {

// The same rows with neighbouring dimensions merged where their strides allow it: each left costs a division a row.
[[nodiscard]] inline RowsView merge_dimensions(const RowsView& view) {
  RowsView merged = view;
  merged.leading = 0;
  for (int d = 0; d < view.leading; ++d) {
    if (view.size[d] == 1) continue;
    const int last = merged.leading - 1;
    if (last >= 0 && merged.stride[last] == view.size[d] * view.stride[d]) {
      merged.size[last] *= view.size[d];
      merged.stride[last] = view.stride[d];
    } else {
      merged.size[merged.leading] = view.size[d];
      merged.stride[merged.leading++] = view.stride[d];
    }
  }
  return merged;
}

// Where a row starts, in elements.
__device__ __forceinline__ int64_t row_offset(const RowsView& view, int64_t row) {
  int64_t offset = 0;
  for (int d = view.leading - 1; d > 0; --d) {
    const Quotient at = divide(row, view.size[d]);
    offset += at.remainder * view.stride[d];
    row = at.quotient;
  }
  return view.leading > 0 ? offset + row * view.stride[0] : 0;
}

// Or-ed bits of everything that a row's address is made of, in bytes.
[[nodiscard]] inline uintptr_t address_bits(const RowsView& view, int64_t element_bytes) {
  auto all = reinterpret_cast<uintptr_t>(view.data);
  for (int d = 0; d < view.leading; ++d) all |= static_cast<uintptr_t>(view.stride[d] * element_bytes);
  return all;
}

// kValues values at `from`, which is aligned to 16 bytes (or to all of them, if they are fewer) where kVector says so.
template <class T, bool kVector, int kValues>
__device__ __forceinline__ void load_values(const typename T::Storage* from, float (&x)[kValues]) {
  using Storage = typename T::Storage;
  constexpr int kPiece = kVector ? min_of<int>(kVectorBytes / sizeof(Storage), kValues) : 1;
  using Piece = Vector<Storage, kPiece>;
#pragma unroll
  for (int i = 0; i < kValues; i += kPiece) {
    const Piece piece = load<Piece>(from + i);
#pragma unroll
    for (int j = 0; j < kPiece; ++j) x[i + j] = T::load(piece.value[j]);
  }
}

template <class T, bool kVector, int kValues>
__device__ __forceinline__ void store_values(const float (&x)[kValues], typename T::Storage* to) {
  using Storage = typename T::Storage;
  constexpr int kPiece = kVector ? min_of<int>(kVectorBytes / sizeof(Storage), kValues) : 1;
  using Piece = Vector<Storage, kPiece>;
#pragma unroll
  for (int i = 0; i < kValues; i += kPiece) {
    Piece piece;
#pragma unroll
    for (int j = 0; j < kPiece; ++j) piece.value[j] = T::store(x[i + j]);
    store(to + i, piece);
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
