// What formulas share that know when a row was last updated. T is as in optimizers.h.
#pragma once

#include "op_kernels/common/isa.h"

namespace rec_sdk {
namespace REC_SDK_ISA {

// A NaN stays a NaN.
constexpr REC_SDK_HD float at_most(float value, float bound) { return bound < value ? bound : value; }
constexpr REC_SDK_HD float at_least(float value, float bound) { return value < bound ? bound : value; }

// Updates of the table since the row's last one; 1 for a row without one.
template <class T>
constexpr REC_SDK_HD T steps_since(const T& last, float iter) {
  return at_most(last, 1.0f) * ((iter - 1.0f) - last) + 1.0f;
}

// exp(x) - 1 for x = log * (steps - uncounted), which is not above 0; and the row's last update is iter.
// Without libm, whose bits differ from machine to machine: the series at y = x / 256, and then eight times
// that of twice the argument. The relative error is about 1e-6, for tiny x too. y is kept in *last: planes
// are few.
template <class T>
constexpr REC_SDK_HD T expm1_of_steps(T* last, float iter, float uncounted, float log) {
  *last = at_least((steps_since(*last, iter) - uncounted) * log, -80.0f) * (1.0f / 256);
  T e = *last * (1.0f / 720) + 1.0f / 120;
  e = e * *last + 1.0f / 24;
  e = e * *last + 1.0f / 6;
  e = e * *last + 0.5f;
  e = e * *last + 1.0f;
  e *= *last;
  for (int doubled = 0; doubled < 8; ++doubled) e *= 2.0f + e;
  *last = *last * 0.0f + iter;
  return e;
}

}  // namespace REC_SDK_ISA
}  // namespace rec_sdk
