// Queries as right operands: rotated, scaled to fp16 by a power of two for each row.
//
// A lane (g, t) has dims 32 t .. 32 t + 31 of every block of row g (16 t .. of width 64): step i of a product takes its
// dims 4 i .. 4 i + 3, which are what its bytes of a token's codes are. Rows are rotated one after the other, in a
// loop: code that runs once waits for its instructions, about 100 cycles for eight of them.
#pragma once
#include "cuda/ptx/ldmatrix.cuh"
#include "cuda/tbq4_attention/rotation.cuh"
#include "cuda/tbq4_attention/shared.cuh"

namespace flashq::cuda {

// Where a row of the item lies in q.
__device__ __forceinline__ int64_t query_offset(const QueryView& q, const Divisor& group, const Segment& segment,
                                                const ItemRows& item, int row) {
  const int query = group.quotient(item.first_row + row);
  const int head = item.first_row + row - query * static_cast<int>(group.value);
  return segment.sequence.batch * q.q_stride[0] + (segment.sequence.q_begin + query) * q.q_stride[1] +
         (item.kv_head * group.value + head) * q.q_stride[2];
}

// Pairs of neighbouring values of row `row`, this lane's dims of block b, in 16 bit; zeros past the item's last row.
template <int D> __device__ __forceinline__ void load_query(const CodeParams& p, const Segment& segment,
                                                            const ItemRows& item, int row, int b,
                                                            uint32_t (&words)[CodeTile<D>::kWidth / 8]) {
  constexpr int kWidth = CodeTile<D>::kWidth, kWords = kWidth / 8;
  const bool real = row < item.rows;
  const auto* from = static_cast<const uint16_t*>(p.call.query.q) +
                     query_offset(p.call.query, p.split.group, segment, item, real ? row : 0) + b * kWidth +
                     ptx::fresh_lane() % 4 * (kWidth / 4);
  if (p.wide_q) {
#pragma unroll
    for (int i = 0; i < kWords; i += 4) {
      const auto four = load<Vector<uint32_t, 4>>(from + 2 * i);
#pragma unroll
      for (int j = 0; j < 4; ++j) words[i + j] = real ? four.value[j] : 0;
    }
  } else {
#pragma unroll
    for (int i = 0; i < kWords; ++i) words[i] = real ? from[2 * i] | uint32_t{from[2 * i + 1]} << 16 : 0;
  }
}
template <class Body> __device__ __forceinline__ void with_type(Dtype dtype, Body body) {
  if (dtype == Dtype::kFloat16)
    body(Float16{});
  else
    body(Bfloat16{});
}

// The largest magnitude becomes 2^10 to 2^11, so that both fp16 parts keep 11 bits of values 2^-14 times as large.
// Infinite and NaN values stay what they are.
struct FloatUnit {
  float inverse, unit;  // powers of two

  __device__ __forceinline__ explicit FloatUnit(float top) {
    constexpr int kTop = 10, kLeast = kTop - 126;  // exponents
    const int exponent = min_of(max_of(static_cast<int>(bits_of(top) >> 23) - 127, kLeast), 127) - kTop;
    unit = float_of(static_cast<uint32_t>(exponent + 127) << 23);
    inverse = float_of(static_cast<uint32_t>(127 - exponent) << 23);
  }
};

// Rows of queries where a warp keeps them in shared memory, in 16 bit (shared.cuh): chunks of 16 bytes, exchanged so
// that fragments are read with few bank conflicts.
template <int D> __device__ __forceinline__ int query_at(int row, int column) {
  const int at = row * (D * 2) + ((column / 8 ^ (row & 7)) * 16) + column % 8 * 2;
  return at / 128 * 256 + at % 128;
}

// What a row of queries is in fp16, times `factor`, and its length times the scale.
struct QueryScale { float factor, length; };

// The rows of a warp's item.
template <int D, int kTiles> struct Queries {
  using Tile = CodeTile<D>;
  static constexpr int kWidth = Tile::kWidth, kBlocks = Tile::kBlocks;
  static constexpr int kWords = Tile::kSteps * 2;   // of a block
  using Words = uint32_t[kTiles][kBlocks][kWords];  // right operands: two of each step
  Words word;
  float factor[kTiles][2];  // of the products of rows 8 n + 2 t + c
  float reach;              // largest length of a query times the scale

  // Of rows that have been rotated.
  __device__ __forceinline__ void read(const unsigned char* memory, const QueryScale* scales, int rows) {
    const int lane = ptx::fresh_lane(), t = lane % 4;
    float longest = lane < rows ? scales[lane].length : 0;
#pragma unroll
    for (int step = 1; step < 8 * kTiles; step *= 2) {
      const float other = __shfl_xor_sync(~0u, longest, step);
      longest = longest >= other || longest != longest ? longest : other;  // a NaN stays
    }
    reach = __shfl_sync(~0u, longest, 0);
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
#pragma unroll
      for (int c = 0; c < 2; ++c) factor[n][c] = scales[min_of(8 * n + 2 * t + c, max_of(rows - 1, 0))].factor;
    }
    read_words(memory, rows, word);
  }
  // A row's dims of this lane, zeros past the last row.
  static __device__ __forceinline__ void read_words(const unsigned char* memory, int rows, Words& word) {
    const int lane = ptx::fresh_lane(), g = lane / 4, t = lane % 4;
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
      const bool real = 8 * n + g < rows;
#pragma unroll
      for (int b = 0; b < kBlocks; ++b)
#pragma unroll
        for (int w = 0; w < kWords; w += 4) {
          const auto four =
              load<Vector<uint32_t, 4>>(memory + query_at<D>(8 * n + g, b * kWidth + t * (kWidth / 4) + 2 * w));
#pragma unroll
          for (int i = 0; i < 4; ++i) word[n][b][w + i] = real ? four.value[i] : 0;
        }
    }
  }
};

// Rotates rows of an item, kRows neighbouring ones at a time, and leaves them, or with kRests what fp16 has no room
// for, in `memory`: every `step`-th of these groups from `first` on.
template <int D> class QueryRotation {
  static constexpr int kWidth = CodeTile<D>::kWidth, kBlocks = CodeTile<D>::kBlocks;
  static constexpr int kLanes = kWidth / 4;  // of a row

 public:
  static constexpr int kRows = 32 / kLanes;

  template <bool kRests>
  static __device__ __forceinline__ void rotate(const CodeParams& p, const SegmentRows& of, int first, int step,
                                                unsigned char* memory, QueryScale* scales) {
    constexpr float kMostGain = kWidth == 128 ? 11.3137085f : 8;  // of the rotation, to an element
    const int rows = of.item.rows, own = ptx::fresh_lane() / kLanes, column = ptx::fresh_lane() % kLanes * 4;
    Raw next = load_row(p, of, min_of(first * kRows + own, rows - 1), column);
#pragma unroll 1
    for (int base = first * kRows; base < rows; base += step * kRows) {
      const Raw raw = next;
      next = load_row(p, of, min_of(base + step * kRows + own, rows - 1), column);
      float x[kBlocks][4], top = 0, squares = 0;
      with_type(p.call.query.dtype, [&](auto type) {
        using T = decltype(type);
#pragma unroll
        for (int i = 0; i < kBlocks * 4; ++i)
          x[i / 4][i % 4] = T::load(static_cast<uint16_t>(raw.value[i / 4].value[i / 2 % 2] >> (i % 2 * 16)));
      });
#pragma unroll
      for (int i = 0; i < kBlocks * 4; ++i) {
        top = fmaxf(top, fabsf(x[i / 4][i % 4]));
        squares = fmaf(x[i / 4][i % 4], x[i / 4][i % 4], squares);
      }
#pragma unroll
      for (int b = 0; b < kBlocks; ++b) rotate_fours<kWidth, false>(x[b]);
#pragma unroll
      for (int step = 1; step < kLanes; step *= 2) {
        top = fmaxf(top, __shfl_xor_sync(~0u, top, step));
        squares += __shfl_xor_sync(~0u, squares, step);
      }
      const FloatUnit scaled(top * kMostGain);
      const int row = base + own;
#pragma unroll
      for (int b = 0; b < kBlocks; ++b) {
        Vector<uint32_t, 2> two;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const float even = x[b][2 * i] * scaled.inverse, odd = x[b][2 * i + 1] * scaled.inverse;
          two.value[i] = ptx::pack<Float16>(even, odd);
          if constexpr (kRests)
            two.value[i] = ptx::pack<Float16>(even - half_to_float(static_cast<uint16_t>(two.value[i])),
                                              odd - half_to_float(static_cast<uint16_t>(two.value[i] >> 16)));
        }
        if (row < rows) store(memory + query_at<D>(row, b * kWidth + column), two);
      }
      if (!kRests && row < rows && column == 0)
        scales[row] = {scaled.unit * p.rule.factor * kLevelUnit<kWidth>, sqrtf(squares) * fabsf(p.call.score.scale)};
    }
    __syncwarp();
  }

 private:
  struct Raw { Vector<uint32_t, 2> value[kBlocks]; };

  static __device__ __forceinline__ Raw load_row(const CodeParams& p, const SegmentRows& of, int row, int column) {
    const auto* from = static_cast<const uint16_t*>(p.call.query.q) +
                       query_offset(p.call.query, p.split.group, of.segment, of.item, row) + column;
    Raw raw;
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) {
      if (p.wide_q) {
        raw.value[b] = load<Vector<uint32_t, 2>>(from + b * kWidth);
      } else {
#pragma unroll
        for (int i = 0; i < 2; ++i)
          raw.value[b].value[i] = from[b * kWidth + 2 * i] | uint32_t{from[b * kWidth + 2 * i + 1]} << 16;
      }
    }
    return raw;
  }
};

}  // namespace flashq::cuda
