// What the row-wise kernels share: ranges for workers, rows of any strides, dtypes, fp32 arithmetic by the IEEE book.
#pragma once
#include <cstring>

#include "core/half.h"
#include "cpu/float_environment.h"
#include "cpu/kernels.h"

namespace flashq::FLASHQ_ISA {
namespace {

// Calls body(begin, end) over contiguous parts of [0, count), one part a worker. Parts hold at least `least` items:
// waking a thread costs some 10 us, so a part should take 50.
template <class Body> void for_ranges(const Launch& launch, int64_t count, int64_t least, const Body& body) {
  const auto workers =
      static_cast<int32_t>(max_of<int64_t>(1, min_of<int64_t>(launch.workers, count / max_of<int64_t>(least, 1))));
  if (workers == 1) {
    if (count > 0) body(int64_t{0}, count);
    return;
  }
  struct Context {
    const Body& body;
    int64_t count, workers;
  } context{body, count, workers};
  launch.parallel(
      workers,
      [](void* pointer, int32_t worker) {
        const auto& c = *static_cast<const Context*>(pointer);
        const int64_t each = c.count / c.workers, rest = c.count % c.workers;
        const int64_t begin = worker * each + min_of<int64_t>(worker, rest);
        c.body(begin, begin + each + (worker < rest ? 1 : 0));
      },
      &context);
}

// Rows per worker for about 50 us of work at `bytes_per_us`.
FLASHQ_HOST int64_t rows_of_50us(int64_t row_bytes, int64_t bytes_per_us) {
  return ceil_div(50 * bytes_per_us, max_of<int64_t>(row_bytes, 1));
}

// The element offsets of consecutive rows of a RowsView, without a division a row.
class RowCursor {
 public:
  RowCursor(const RowsView& view, int64_t row) : view_(view) {
    for (int d = view.leading - 1; d >= 0; --d) {
      index_[d] = row % view.size[d];
      row /= view.size[d];
      offset_ += index_[d] * view.stride[d];
    }
  }
  int64_t offset() const { return offset_; }
  void next() {
    for (int d = view_.leading - 1; d >= 0; --d) {
      offset_ += view_.stride[d];
      if (++index_[d] < view_.size[d]) return;
      offset_ -= view_.size[d] * view_.stride[d];
      index_[d] = 0;
    }
  }

 private:
  const RowsView& view_;
  int64_t index_[kMaxLeading] = {}, offset_ = 0;
};

// Calls function(Float32{}), (Float16{}) or (Bfloat16{}).
template <class Function> FLASHQ_HOST auto with_dtype(Dtype dtype, const Function& function) noexcept {
  switch (dtype) {
    case Dtype::kFloat16: return function(Float16{});
    case Dtype::kBfloat16: return function(Bfloat16{});
    default: return function(Float32{});
  }
}
constexpr int kMaxHeadDim = 256;  // of TBQ4

template <class T> FLASHQ_HOST void load_row(const typename T::Storage* from, int64_t head_dim, float* x) {
  for (int64_t i = 0; i < head_dim; ++i) x[i] = T::load(from[i]);
}
template <class T> FLASHQ_HOST void store_row(const float* x, int64_t head_dim, typename T::Storage* to) {
  for (int64_t i = 0; i < head_dim; ++i) to[i] = T::store(x[i]);
}

}  // namespace
}  // namespace flashq::FLASHQ_ISA
