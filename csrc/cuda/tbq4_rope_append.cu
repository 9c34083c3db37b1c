// tbq4_rope_append_: a decode step's queries and keys turned, keys and values quantized into their slots and, where
// asked for, kept as they are: one launch.
//
// Made for few tokens: what it takes is a launch and the way from a position to its angles to a key's codes. Lanes load
// the elements that theirs turn with themselves, with nothing in front of that, and a block of threads has keys, values
// or queries only, so that queries do not wait for the codec. Of many tokens, lanes turn several heads by angles that
// they load once.
#include <cuda_runtime_api.h>

#include "core/rope.h"
#include "cuda/kernels.h"
#include "cuda/launch.h"
#include "cuda/overlapping_launch.h"
#include "cuda/ptx/dependent_launch.cuh"
#include "cuda/rope_turn.h"
#include "cuda/tbq4/lanes.cuh"
#include "cuda/tbq4/rows.cuh"

namespace flashq::cuda {
namespace {

constexpr int64_t kMostHeads = 8;  // of queries, that a lane turns

enum Kind : int { kKeys, kValues, kQueries };

// Rows of q, k or v, cut into blocks of the codec.
struct Source {
  const void* from;
  int64_t token_stride, head_stride;
  WideDivisor token_blocks;  // heads * row_blocks; of queries, instead of heads, how many times some
  int64_t blocks;
};

struct Slots {
  IndexView view;
  WideDivisor page_size;
  int64_t num_pages;

  // quotient: the page, -1 where a token has none; remainder: the place in it.
  __device__ __forceinline__ Quotient place(int64_t slot) const {
    if (slot < 0) return {-1, 0};
    const Quotient at = page_size.divide(slot);
    return {at.quotient < num_pages ? at.quotient : -1, at.remainder};
  }
};
Slots make_slots(const IndexView& view, int64_t num_pages, int64_t page_size) {
  // Pages of no slots: every slot is out of range.
  return {view, WideDivisor(max_of<int64_t>(page_size, 1)), page_size == 0 ? 0 : num_pages};
}

struct RopeAppendParams {
  Source sources[3];          // by Kind
  int64_t kv_groups, groups;  // a group: what a block of threads takes at a time, of one kind
  int64_t kv_heads, q_heads;
  int row_blocks, query_heads;  // blocks of a row; heads of queries that a lane turns
  uint8_t* codes[2];
  uint16_t* norms[2];
  const uint16_t* k_offsets;
  int64_t k_offsets_stride[2];
  Slots slots, exact_slots;
  void* exact[2];
  int64_t exact_stride[2][3];
  void* q_out;
  RotaryTables rotary;
  IndexView positions;
};

// How a lane's values, those of `column` and after, turn. With kVector all of them do or none, and a row's halves are
// whole lanes.
template <class T, int kCount, bool kVector> class Turn {
 public:
  using Storage = typename T::Storage;

  __device__ __forceinline__ Turn(const RotaryTables& rotary, int column)
      : rotary_(rotary), column_(column), pairs_(static_cast<int>(rotary.pairs)) {}

  // A lane's values of a row, and those that they turn with.
  struct Values { float own[kCount] = {}, others[kCount] = {}; };
  __device__ __forceinline__ void load_row(const Storage* row, Values& x) const {
    load_values<T, kVector>(row + column_, x.own);
    if (rotary_.interleaved) {
#pragma unroll
      for (int i = 0; i < kCount; ++i) x.others[i] = x.own[i ^ 1];
    } else if constexpr (kVector) {
      if (turns(0)) load_values<T, true>(row + (is_second(0) ? column_ - pairs_ : column_ + pairs_), x.others);
    } else {
#pragma unroll
      for (int i = 0; i < kCount; ++i)
        if (turns(i)) x.others[i] = T::load(row[column_ + i + (is_second(i) ? -pairs_ : pairs_)]);
    }
  }

  // A position outside of the tables has no angle, but NaN.
  __device__ __forceinline__ void load_angles(int64_t position) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) cos_[i] = sin_[i] = float_of(0x7fffffff);
    if (position < 0 || position >= rotary_.max_position) return;
    load_table(rotary_.cos, position * rotary_.cos_stride, cos_);
    load_table(rotary_.sin, position * rotary_.sin_stride, sin_);
  }

  __device__ __forceinline__ void apply(Values& x) const {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const float turned = is_second(i) ? rope::second_of(x.others[i], x.own[i], cos_[i], sin_[i])
                                        : rope::first_of(x.own[i], x.others[i], cos_[i], sin_[i]);
      if (turns(i)) x.own[i] = T::load(T::store(turned));  // as if another op had stored it
    }
  }

 private:
  __device__ __forceinline__ bool turns(int i) const { return column_ + (kVector ? 0 : i) < 2 * pairs_; }
  __device__ __forceinline__ bool is_second(int i) const {
    return rotary_.interleaved ? i % 2 == 1 : column_ + (kVector ? 0 : i) >= pairs_;
  }
  __device__ __forceinline__ int angle(int i) const {
    return rotary_.interleaved ? (column_ + i) / 2 : column_ + i - (is_second(i) ? pairs_ : 0);
  }

  __device__ __forceinline__ void load_table(const void* table, int64_t row, float (&x)[kCount]) const {
    if (rotary_.dtype == Dtype::kFloat32)
      load_table_as<Float32>(static_cast<const float*>(table) + row, x);
    else
      load_table_as<T>(static_cast<const Storage*>(table) + row, x);
  }
  template <class U>
  __device__ __forceinline__ void load_table_as(const typename U::Storage* row, float (&x)[kCount]) const {
    if constexpr (!kVector) {
#pragma unroll
      for (int i = 0; i < kCount; ++i)
        if (turns(i)) x[i] = U::load(row[angle(i)]);
    } else if (turns(0)) {
      if (!rotary_.interleaved) {
        load_values<U, true>(row + angle(0), x);
        return;
      }
      const auto angles = load<Packed<U, kCount / 2>>(row + angle(0));
#pragma unroll
      for (int i = 0; i < kCount; ++i) x[i] = angles.get(i / 2);
    }
  }

  const RotaryTables& rotary_;
  int column_, pairs_;
  float cos_[kCount], sin_[kCount];
};

template <class T, bool kVector, int kCount>
__device__ __forceinline__ void store_row(const float (&x)[kCount], typename T::Storage* to) {
  if constexpr (kVector) {
    store_values<T>(x, to);
  } else {
#pragma unroll
    for (int i = 0; i < kCount; ++i) to[i] = T::store(x[i]);
  }
}

// Where a lane works.
struct Place {
  int64_t token, head;
  int part, column;  // block of the row, first of the lane's values there
};
template <class Lanes, int kWidth>
__device__ __forceinline__ Place lane_place(const RopeAppendParams& p, const Source& source, int64_t block, int lane) {
  const Quotient at = source.token_blocks.divide(block);
  const int part = p.row_blocks == 1 ? 0 : static_cast<int>(at.remainder & 1);
  return {at.quotient, p.row_blocks == 1 ? at.remainder : at.remainder >> 1, part,
          part * kWidth + lane * Lanes::kValues};
}
template <class T> __device__ __forceinline__ const typename T::Storage* row_of(const Source& source, int64_t token,
                                                                                int64_t head) {
  return static_cast<const typename T::Storage*>(source.from) + token * source.token_stride + head * source.head_stride;
}

// The next head is on its way while one turns.
template <class T, int kWidth, bool kVector>
__device__ __forceinline__ void turn_queries(const RopeAppendParams& p, int64_t block, int lane) {
  using Lanes = BlockLanes<kWidth>;
  using Rotation = Turn<T, Lanes::kValues, kVector>;
  const Source& source = p.sources[kQueries];
  if (block >= source.blocks) return;
  const Place at = lane_place<Lanes, kWidth>(p, source, block, lane);
  const int64_t head = at.head * p.query_heads;
  const int count = static_cast<int>(min_of<int64_t>(p.query_heads, p.q_heads - head));
  const int64_t position = p.positions(at.token);
  const auto* row = row_of<T>(source, at.token, head);
  const int64_t head_dim = int64_t{p.row_blocks} * kWidth;
  auto* to = static_cast<typename T::Storage*>(p.q_out) + (at.token * p.q_heads + head) * head_dim + at.column;
  Rotation rotation(p.rotary, at.column);
  typename Rotation::Values x, next;
  rotation.load_row(row, x);
  if (count > 1) rotation.load_row(row += source.head_stride, next);
  rotation.load_angles(position);
#pragma unroll 1
  for (int i = 0; i < count; ++i, to += head_dim) {
    rotation.apply(x);
    store_values<T>(x.own, to);
    x = next;
    if (i + 2 < count) rotation.load_row(row += source.head_stride, next);
  }
}

template <class T, int kWidth, bool kVector>
__device__ __forceinline__ void append_block(const RopeAppendParams& p, int kind, int64_t block,
                                             const BlockLanes<kWidth>& lanes) {
  using Lanes = BlockLanes<kWidth>;
  using Storage = typename T::Storage;
  using Rotation = Turn<T, Lanes::kValues, kVector>;
  const Source& source = p.sources[kind];
  typename Rotation::Values x;
  int64_t target = -1;
  if (block < source.blocks) {
    const Place at = lane_place<Lanes, kWidth>(p, source, block, lanes.lane());
    const auto* row = row_of<T>(source, at.token, at.head);
    // Loads in the order of what waits for them, across the branches: the compiler keeps it.
    const int64_t position = kind == kKeys ? p.positions(at.token) : 0;
    const int64_t slot = p.slots.view(at.token);
    const int64_t exact_slot = p.exact_slots.view.given() ? p.exact_slots.view(at.token) : -1;
    Rotation rotation(p.rotary, at.column);
    if (kind == kKeys) {
      rotation.load_row(row, x);
      rotation.load_angles(position);
    } else {
      load_values<T, kVector>(row + at.column, x.own);
    }
    float offset[Lanes::kValues] = {};
    if (const Quotient place = p.slots.place(slot); place.quotient >= 0) {
      target = ((place.quotient * p.kv_heads + at.head) * p.slots.page_size.value() + place.remainder) * p.row_blocks +
               at.part;
      if (kind == kKeys && p.k_offsets)
        load_values<Float16, kVector>(p.k_offsets + place.quotient * p.k_offsets_stride[0] +
                                          at.head * p.k_offsets_stride[1] + at.column,
                                      offset);
    }
    if (kind == kKeys) rotation.apply(x);
    if (const Quotient place = p.exact_slots.place(exact_slot); place.quotient >= 0) {
      const int64_t (&stride)[3] = p.exact_stride[kind];
      store_row<T, kVector>(x.own, static_cast<Storage*>(p.exact[kind]) + place.quotient * stride[0] +
                                       place.remainder * stride[1] + at.head * stride[2] + at.column);
    }
#pragma unroll
    for (int i = 0; i < Lanes::kValues; ++i) x.own[i] = ieee::sub(x.own[i], offset[i]);  // x - 0 is x
  }
  const auto [codes, norm] = lanes.encode(x.own);
  if (target < 0) return;
  store_codes<kVector>(p.codes[kind] + target * (kWidth / 2) + lanes.lane() * (Lanes::kValues / 2), codes);
  if (lanes.lane() == 0) p.norms[kind][target] = norm;
}

template <class T, int kWidth, bool kVector> __global__ void __launch_bounds__(BlockLanes<kWidth>::kThreads)
    rope_append_kernel(const __grid_constant__ RopeAppendParams p) {
  using Lanes = BlockLanes<kWidth>;
  const Lanes lanes;
  ptx::allow_dependents();
  ptx::wait_for_primary();
  for (int64_t group = blockIdx.x; group < p.groups; group += gridDim.x) {
    const int kind = group < p.kv_groups ? kKeys : group < 2 * p.kv_groups ? kValues : kQueries;
    const int64_t block = (group - kind * p.kv_groups) * Lanes::kBlocks + static_cast<int>(threadIdx.x) / Lanes::kLanes;
    if (kind == kQueries)
      turn_queries<T, kWidth, kVector>(p, block, lanes.lane());
    else
      append_block<T, kWidth, kVector>(p, kind, block, lanes);
  }
}

// Whether all rows can be read and written in vectors of 16 bytes, and turn in them.
bool vectors_fit(const Tbq4RopeAppendParams& p) {
  const AppendSource& s = p.source;
  const int64_t element = size_of(s.dtype), table_element = size_of(p.rotary.dtype);
  const int64_t table_strides[2] = {p.rotary.cos_stride, p.rotary.sin_stride};
  const uintptr_t all = address_bits(p.q, p.q_stride, element) | address_bits(s.k, s.k_stride, element) |
                        address_bits(s.v, s.v_stride, element) | address_bits(p.k_codes) | address_bits(p.v_codes) |
                        address_bits(p.k_offsets, p.k_offsets_stride, 2) |
                        address_bits(p.exact.k, p.exact.k_stride, element) |
                        address_bits(p.exact.v, p.exact.v_stride, element) |
                        address_bits(p.rotary.cos, table_strides, table_element) | address_bits(p.rotary.sin);
  return widest_vector(all) == kVectorBytes && p.rotary.pairs % 8 == 0;
}

}  // namespace

Status tbq4_rope_append(const Tbq4RopeAppendParams& p, const Launch& launch) {
  Device device;
  if (const Status status = enter(launch, device); !status.ok()) return status;
  const AppendSource& s = p.source;
  if (s.tokens == 0 || s.kv_heads + p.q_heads == 0) return {};
  if (s.kv_heads == 0 && vectors_fit(p)) {
    launch_turn(p, device, launch);
    return launch_status();
  }
  RopeAppendParams params{};
  params.kv_heads = s.kv_heads;
  params.q_heads = p.q_heads;
  params.codes[kKeys] = p.k_codes;
  params.codes[kValues] = p.v_codes;
  params.norms[kKeys] = p.k_norms;
  params.norms[kValues] = p.v_norms;
  params.k_offsets = p.k_offsets;
  params.slots = make_slots(s.slots, p.num_pages, p.page_size);
  params.exact_slots = make_slots(p.exact.slots, p.exact.num_pages, p.exact.page_size);
  params.exact[kKeys] = p.exact.k;
  params.exact[kValues] = p.exact.v;
  for (int i = 0; i < 2; ++i) params.k_offsets_stride[i] = p.k_offsets_stride[i];
  for (int i = 0; i < 3; ++i) {
    params.exact_stride[kKeys][i] = p.exact.k_stride[i];
    params.exact_stride[kValues][i] = p.exact.v_stride[i];
  }
  params.q_out = p.q_out;
  params.rotary = p.rotary;
  params.positions = p.positions;
  with_dtype(s.dtype, [&](auto t) {
    using T = decltype(t);
    with_width(s.head_dim, vectors_fit(p), [&](auto width, auto aligned) {
      using Lanes = BlockLanes<width.value>;
      params.row_blocks = static_cast<int>(s.head_dim) / width.value;
      const auto source = [&](const void* from, const int64_t (&stride)[2], int64_t heads) -> Source {
        const int64_t token_blocks = heads * params.row_blocks;
        return {from, stride[0], stride[1], WideDivisor(max_of<int64_t>(token_blocks, 1)), s.tokens * token_blocks};
      };
      params.sources[kKeys] = source(s.k, s.k_stride, s.kv_heads);
      params.sources[kValues] = source(s.v, s.v_stride, s.kv_heads);
      params.kv_groups = ceil_div(params.sources[kKeys].blocks, Lanes::kBlocks);
      // As many heads a lane as leave a block of threads to every multiprocessor.
      const int64_t query_groups = ceil_div(s.tokens * p.q_heads * params.row_blocks, Lanes::kBlocks);
      params.query_heads =
          static_cast<int>(min_of(max_of<int64_t>(ceil_div(query_groups, device.sm_count), 1), kMostHeads));
      params.sources[kQueries] = source(p.q, p.q_stride, ceil_div(p.q_heads, params.query_heads));
      params.groups = 2 * params.kv_groups + ceil_div(params.sources[kQueries].blocks, Lanes::kBlocks);
      const dim3 grid(static_cast<unsigned>(min_of<int64_t>(params.groups, INT32_MAX)));
      launch_overlapping(rope_append_kernel<T, width.value, aligned.value != 0>, grid, Lanes::kThreads, 0, device,
                         launch, params);
    });
  });
  return launch_status();
}

}  // namespace flashq::cuda
