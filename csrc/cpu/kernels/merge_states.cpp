// merge_states: partial attention results over disjoint keys to the result over all of them.
#include "core/softmax_state.h"
#include "cpu/kernels/rows.h"

namespace flashq::FLASHQ_ISA {
namespace {

constexpr int64_t kChunk = 256;  // dims accumulated at a time, on the stack

struct Row {
  const char* outs;  // of partial 0
  const float* lses;
  char* out;  // (head_dim)
  float* lse;
};

// The only partial that counts, bit for bit: a detour through fp32 would change the payload of a NaN, log(1) a -0.
// But a NaN lse says that the row is NaN, whatever stands in it.
template <class T> void copy_partial(const MergeParams& p, const Row& row, int64_t partial) {
  using Storage = typename T::Storage;
  const float lse = row.lses[partial * p.lses_stride[0]];
  auto* out = reinterpret_cast<Storage*>(row.out);
  const auto* from = reinterpret_cast<const Storage*>(row.outs) + partial * p.outs_stride[0];
  if (lse != lse) {
    for (int64_t d = 0; d < p.head_dim; ++d) out[d] = T::store(lse);
  } else if (p.head_dim > 0) {
    std::memcpy(out, from, p.head_dim * sizeof(Storage));
  }
  *row.lse = lse;
}

template <class T> void merge_partials(const MergeParams& p, const Row& row, int64_t first) {
  using Storage = typename T::Storage;
  const auto* outs = reinterpret_cast<const Storage*>(row.outs);
  auto* out = reinterpret_cast<Storage*>(row.out);
  SoftmaxState<Natural> state;
  int64_t dim = 0;
  do {  // once even for head_dim 0, for the lse
    const int64_t dims = min_of(kChunk, p.head_dim - dim);
    float o[kChunk];
    state = {row.lses[first * p.lses_stride[0]], 1};
    const Storage* part = outs + first * p.outs_stride[0] + dim;
    for (int64_t d = 0; d < dims; ++d) o[d] = T::load(part[d]);
    for (int64_t k = first + 1; k < p.partials; ++k) {
      const float lse = row.lses[k * p.lses_stride[0]];
      if (lse == -kInf) continue;
      const MergeWeights weight = merge(state, SoftmaxState<Natural>{lse, 1});
      part = outs + k * p.outs_stride[0] + dim;
      for (int64_t d = 0; d < dims; ++d) o[d] = o[d] * weight.a + T::load(part[d]) * weight.b;
    }
    const float scale = 1 / state.sum;
    for (int64_t d = 0; d < dims; ++d) out[dim + d] = T::store(o[d] * scale);
    dim += kChunk;
  } while (dim < p.head_dim);
  *row.lse = state.lse();
}

template <class T> void merge_row(const MergeParams& p, const Row& row) {
  int64_t first = -1, live = 0;
  for (int64_t k = p.partials - 1; k >= 0; --k) {
    if (row.lses[k * p.lses_stride[0]] == -kInf) continue;
    first = k;
    ++live;
  }
  if (live > 1) return merge_partials<T>(p, row, first);
  if (live == 1) return copy_partial<T>(p, row, first);
  if (p.head_dim > 0) std::memset(row.out, 0, p.head_dim * sizeof(typename T::Storage));
  *row.lse = -kInf;
}

}  // namespace

Status merge_states(const MergeParams& p, const Launch& launch) {
  const int64_t bytes = size_of(p.dtype);
  const auto merge_range = [&](auto dtype, int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t head = i % p.heads, token = i / p.heads % p.tokens, b = i / p.heads / p.tokens;
      const int64_t from = b * p.outs_stride[1] + token * p.outs_stride[2] + head * p.outs_stride[3];
      merge_row<decltype(dtype)>(p, {.outs = static_cast<const char*>(p.outs) + from * bytes,
                                     .lses = p.lses + b * p.lses_stride[1] + head * p.lses_stride[2] +
                                             token * p.lses_stride[3],
                                     .out = static_cast<char*>(p.out) + i * p.head_dim * bytes,
                                     .lse = p.lse + (b * p.heads + head) * p.tokens + token});
    }
  };
  const int64_t least = rows_of_50us((p.partials + 1) * p.head_dim * bytes, 4000);
  for_ranges(launch, p.batch * p.tokens * p.heads, least, [&](int64_t begin, int64_t end) noexcept {
    with_dtype(p.dtype, [&](auto dtype) { merge_range(dtype, begin, end); });
  });
  return {};
}

}  // namespace flashq::FLASHQ_ISA
