// Norms of the gradient of a row.
#pragma once

#include <cstdint>
#include <cstring>

#include "op_kernels/common/aggregate.h"

namespace rec_sdk {
namespace REC_SDK_ISA {

// Returns the largest magnitude, or NaN if any element is NaN. The bits of magnitudes are compared as
// integers; in this order NaN is above infinity.
template <int64_t kDim>
REC_SDK_INLINE float largest_magnitude(const float* __restrict g, int64_t count) {
  const int64_t dim = kDim > 0 ? kDim : count;
  int32_t largest = 0;
  for (int64_t k = 0; k < dim; ++k) {
    int32_t bits;
    memcpy(&bits, g + k, sizeof(bits));
    bits &= INT32_MAX;
    largest = largest < bits ? bits : largest;
  }
  float result;
  memcpy(&result, &largest, sizeof(result));
  return result;
}

// Computes the sum of squares and the largest magnitude of a gradient. Not inlined, because all optimizers
// and formats share it.
template <int64_t kDim>
__attribute__((noinline)) void norms_of_row(const float* g, int64_t count, float* squares, float* largest) {
  *squares = lane_sum(kDim > 0 ? kDim : count, [g](int64_t k) { return g[k] * g[k]; });
  *largest = largest_magnitude<kDim>(g, count);
}

}  // namespace REC_SDK_ISA
}  // namespace rec_sdk
