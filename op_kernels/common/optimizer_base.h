// Optimizer formulas. Every backend uses the same struct: the compiler vectorizes the CPU's loop over it, a
// CUDA thread calls it, and AscendC runs it on a tile of rows at once.
//
// An optimizer has
//   name()                       the value of the operator's `optimizer` argument; called on the host
//   coefficients()               names of coefficients [1], [2], ..., separated by spaces; called on the host
//   kElementStates, kRowStates   numbers of states of shape [dim] and of shape [1]; this is also their order
//                                in the record
//   kMeasures                    passes over the row before its weight changes; may be 0 without row states
//   kMeasuresRecord              whether the passes read the weight or element states, or only the gradient
//   kSums, kValues               the most Numbers that a measure and a begin_row return
//   Optimizer(coefficients)      constructor, from one table's coefficients; [0] is max_gradient for all
//                                optimizers
// and, in the order in which a row is updated,
//   advance(states, g)           computes an element's new states; each pass also runs it, on copies of the
//                                old states
//   measure(Pass<p>, w, states, g, values)                 returns Numbers to be summed over the row's
//                                elements; `values` are from the previous pass
//   begin_row(Pass<p>, row_states, sums, dim, values)      changes the row's states; returns the values for
//                                the next pass or for every element; run once per row and pass
//   element(w, states, g, values)                          computes an element's new weight; it may change
//                                the element's states too
//
// T is float, or a plane of floats (ascendc/planes.h). So the formulas use only + - * /, sqrtf, at_least and
// at_most, and no branches. They name an intermediate result only where it is used twice, because a named
// plane takes memory. They are constexpr, because the planes that they need are counted while the kernels are
// compiled (ascendc/plane_count.h).
#pragma once

#include <math.h>

#include <cstdint>

#include "op_kernels/common/isa.h"
#include "op_kernels/common/numbers.h"
#include "op_kernels/common/row_steps.h"

namespace rec_sdk {
namespace REC_SDK_ISA {

// The values that an optimizer without row states or measures computes per row: none.
struct NoValues {};

template <int kPass>
struct Pass {
  static constexpr int kNumber = kPass;
};

// Base of optimizers that update each element by itself, without sums over the row.
struct ElementwiseOptimizer {
  static constexpr int kRowStates = 0, kMeasures = 0, kSums = 0, kValues = 0;
  static constexpr bool kMeasuresRecord = false;

  template <class T>
  constexpr REC_SDK_HD void advance(T*, const T&) const {}
};

// Base of optimizers with one pass, which sums the squares of the gradient.
struct MeanSquareOptimizer {
  static constexpr int kMeasures = 1, kSums = 1, kValues = 1;
  static constexpr bool kMeasuresRecord = false;

  template <class T>
  constexpr REC_SDK_HD Numbers<T, 1> measure(Pass<0>, const T&, const T*, const T& g, NoValues) const {
    return {{g * g}};
  }
};

// Lower bound of a norm that a formula divides by, so that 0 / 0 is 0. Every norm whose square is not 0 in
// fp32 is larger. With a smaller bound, a step whose norm's square underflows to 0 would be scaled up to a
// large step.
constexpr float kLeastNorm = 3e-23f;

// The largest finite number.
constexpr float kLargest = 3.402823466e+38f;

// Moving averages of the gradient and of its square. They decay before the new value is added. The form
// average + (1 - beta) * (value - average) is not used: a large average would absorb the digits of a small
// value, however small beta is, and an average that has overflowed would become a NaN.
struct Moments {
  float beta1, one_minus_beta1, beta2, one_minus_beta2;
  // c: the four coefficients, one after another.
  explicit constexpr REC_SDK_HD Moments(const float* c)
      : beta1(c[0]), one_minus_beta1(c[1]), beta2(c[2]), one_minus_beta2(c[3]) {}

  template <class T>
  constexpr REC_SDK_HD void first(T* average, const T& g) const {
    *average *= beta1;
    *average += one_minus_beta1 * g;
  }
  // The second factor g is multiplied last, because g * g may overflow where one_minus_beta2 * g * g does
  // not.
  template <class T>
  constexpr REC_SDK_HD void second(T* average, const T& g) const {
    *average *= beta2;
    *average += one_minus_beta2 * g * g;
  }
  // One moving average for the whole row, of the mean of the `dim` squared gradients. `squares` is the sum of
  // these squares.
  template <class T>
  constexpr REC_SDK_HD void second(T* average, const T& squares, float dim) const {
    *average *= beta2;
    *average += squares / dim * one_minus_beta2;
  }
};

}  // namespace REC_SDK_ISA
}  // namespace rec_sdk
