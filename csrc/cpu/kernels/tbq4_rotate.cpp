// tbq4_rotate: the block rotation of queries, or its inverse, row by row.
#include "core/tbq4/rotation.h"
#include "cpu/kernels/rows.h"

namespace flashq::FLASHQ_ISA {
namespace {

template <int kWidth> [[gnu::noinline]] void rotate_row(float* x, int64_t head_dim, bool inverse) noexcept {
  for (int64_t i = 0; i < head_dim; i += kWidth) {
    if (inverse) {
      tbq4::unrotate<kWidth>(x + i);
    } else {
      tbq4::rotate<kWidth>(x + i);
    }
  }
}

template <class T> [[gnu::noinline]] void rotate_rows(const Tbq4RotateParams& p, int64_t begin, int64_t end) noexcept {
  using Storage = typename T::Storage;
  const int64_t dim = p.x.head_dim;
  RowCursor from(p.x, begin);
  float x[kMaxHeadDim];
  for (int64_t row = begin; row < end; ++row, from.next()) {
    load_row<T>(static_cast<const Storage*>(p.x.data) + from.offset(), dim, x);
    if (dim == 64) {
      rotate_row<64>(x, dim, p.inverse);
    } else {
      rotate_row<128>(x, dim, p.inverse);
    }
    store_row<T>(x, dim, static_cast<Storage*>(p.out) + row * dim);
  }
}

}  // namespace

Status tbq4_rotate(const Tbq4RotateParams& p, const Launch& launch) {
  for_ranges(launch, p.x.rows, rows_of_50us(p.x.head_dim * 4, 4000), [&](int64_t begin, int64_t end) noexcept {
    const IeeeScope scope;
    with_dtype(p.x.dtype, [&](auto t) noexcept { rotate_rows<decltype(t)>(p, begin, end); });
  });
  return {};
}

}  // namespace flashq::FLASHQ_ISA
