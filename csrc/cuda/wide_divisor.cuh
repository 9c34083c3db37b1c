// As Divisor, for dividends and divisors of any size without a call: kernels that hold a block in registers have none
// to save across one. Ten instructions.
#pragma once
#include "core/portability.h"
#include "cuda/vector.cuh"

namespace flashq::cuda {

class WideDivisor {
 public:
  WideDivisor() = default;
  explicit WideDivisor(int64_t divisor)
      : divisor_(divisor), reciprocal_(~uint64_t{0} / static_cast<uint64_t>(divisor)) {}

  __device__ __forceinline__ int64_t value() const { return divisor_; }

  // n >= 0. n * reciprocal_ / 2^64 is less than n / divisor by at most (1 + 1 / divisor) / 2, so the estimate is right
  // or one too small.
  __device__ __forceinline__ Quotient divide(int64_t n) const {
    auto quotient = static_cast<int64_t>(__umul64hi(static_cast<uint64_t>(n), reciprocal_));
    int64_t remainder = n - quotient * divisor_;
    if (remainder >= divisor_) {
      ++quotient;
      remainder -= divisor_;
    }
    return {quotient, remainder};
  }

 private:
  int64_t divisor_ = 1;
  uint64_t reciprocal_ = ~uint64_t{0};
};

}  // namespace flashq::cuda
