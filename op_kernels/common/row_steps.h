// Functions for optimizer formulas that depend on when a row was last updated. T is a float or a plane of
// floats, as in optimizer_base.h.
#pragma once

#include "op_kernels/common/isa.h"

namespace rec_sdk {
namespace REC_SDK_ISA {

// at_most returns the smaller and at_least the larger of the two numbers. A NaN value stays a NaN.
constexpr REC_SDK_HD float at_most(float value, float bound) { return bound < value ? bound : value; }
constexpr REC_SDK_HD float at_least(float value, float bound) { return value < bound ? bound : value; }

// Returns the number of updates of the table since the row's last update, `iter - last`. It is 1 for a row
// that was never updated (last = 0).
template <class T>
constexpr REC_SDK_HD T steps_since(const T& last, float iter) {
  return at_most(last, 1.0f) * ((iter - 1.0f) - last) + 1.0f;
}

// Sets *e = exp(x) - 1, where y = x / 256. The caller must have set *e to y / 720. libm is not used, because
// its results differ between machines. The function evaluates the power series at y, and then doubles the
// argument eight times. The relative error is about 1e-6, also for tiny x.
template <class T>
constexpr REC_SDK_HD void expm1_of_256_times(T* e, const T& y) {
  *e = *e + 1.0f / 120;
  *e = *e * y + 1.0f / 24;
  *e = *e * y + 1.0f / 6;
  *e = *e * y + 0.5f;
  *e = *e * y + 1.0f;
  *e *= y;
  for (int doubled = 0; doubled < 8; ++doubled) *e *= 2.0f + *e;
}

// Returns exp(x) - 1 for x = log * (steps_since(*last, iter) - uncounted), which must not be above 0, and
// sets *last = iter. *last holds x / 256 in between, which saves a plane.
template <class T>
constexpr REC_SDK_HD T expm1_of_steps(T* last, float iter, float uncounted, float log) {
  *last = at_least((steps_since(*last, iter) - uncounted) * log, -80.0f) * (1.0f / 256);
  T e = *last * (1.0f / 720);
  expm1_of_256_times(&e, *last);
  *last = *last * 0.0f + iter;
  return e;
}

// Returns 1 if value is above the bound, else 0.
template <class T>
constexpr REC_SDK_HD T above(const T& value, float bound) {
  return at_most(at_least((value - bound) * 1e30f, 0.0f), 1.0f);
}

// Sets *log to the natural logarithm of *x, 1 <= *x <= 2^31, without libm. *x is divided by powers of two
// (2^16, 2^8, ..., 2) until it is at most 2; the series of the inverse hyperbolic tangent then gives the
// logarithm of the rest. Overwrites *x and *scratch. The absolute error is about 1e-7.
template <class T>
constexpr REC_SDK_HD void logarithm(T* log, T* x, T* scratch) {
  constexpr float kPowers[] = {65536.0f, 256.0f, 16.0f, 4.0f, 2.0f};
  constexpr float kLogarithms[] = {11.090354889f, 5.545177444f, 2.772588722f, 1.386294361f, 0.693147181f};
  *log = *x * 0.0f;
  for (int p = 0; p < 5; ++p) {
    *scratch = above(*x, kPowers[p]);
    *log += *scratch * kLogarithms[p];
    *x *= *scratch * (1.0f / kPowers[p] - 1.0f) + 1.0f;  // exact
  }
  *scratch = (*x - 1.0f) / (*x + 1.0f);
  *x = *scratch * *scratch;
  *scratch *= 2.0f;
  *log += ((((((*x * (1.0f / 13) + 1.0f / 11) * *x + 1.0f / 9) * *x + 1.0f / 7) * *x + 1.0f / 5) * *x +
            1.0f / 3) *
               *x +
           1.0f) *
          *scratch;
}

}  // namespace REC_SDK_ISA
}  // namespace rec_sdk
