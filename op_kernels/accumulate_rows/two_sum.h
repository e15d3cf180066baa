// Compensated addition: a sum and its accumulated rounding error. T is a float or a plane of floats, as in
// common/optimizer_base.h.
#pragma once

#include "op_kernels/common/isa.h"

namespace rec_sdk {
namespace REC_SDK_ISA {

template <class T>
constexpr REC_SDK_HD void two_sum(T& sum, T& compensation, const T& g) {
  // Knuth's two-sum computes the rounding error of the addition exactly; the last three lines renormalize, so
  // that the sum alone is the best float for the total.
  const T total = sum + g;
  const T virtual_g = total - sum;
  compensation += (sum - (total - virtual_g)) + (g - virtual_g);
  sum = total + compensation;
  compensation -= sum - total;
}

}  // namespace REC_SDK_ISA
}  // namespace rec_sdk
