// Optimizer formulas. Each struct serves every backend of this language: the CPU loop vectorises
// it, a CUDA thread calls it, and AscendC runs it on a tile of rows at once.
//
// An optimizer has
//   name()                       as the operator's `optimizer` argument names it; for the host
//   coefficients()               names of its coefficients, [1] on, in their order; for the host
//   kElementStates, kRowStates   fp32 states of [dim], then of [1], in the order of the record
//   kMeasures                    passes over the row before its weight changes; without row states perhaps 0
//   kMeasuresRecord              whether they need weight or element states, or the gradient alone
//   kSums, kValues               the most Numbers of a measure, and of a begin_row
//   Optimizer(coefficients)      of one table; [0] is max_gradient, common to all
// and, in the order in which a row is updated,
//   advance(states, g)           an element's new states. Also run for each pass, on copies of the old ones
//   measure(Pass<p>, w, states, g, values)                 Numbers to be summed over the row's elements; the
//                                values are of the pass before
//   begin_row(Pass<p>, row_states, sums, dim, values)      changes the row's states; gives the values for the
//                                next pass or for every element; run once a row
//   element(w, states, g, values)                          an element's new weight, perhaps its states too
//
// T is float, or a plane of floats (ascendc/planes.h): the formulas use + - * /, sqrtf, at_least and at_most,
// no branches, and name an intermediate result only where it is used twice. constexpr: the planes that they
// need are counted while the kernels are compiled (ascendc/plane_count.h).
#pragma once

#include <math.h>

#include <cstdint>

#include "op_kernels/common/isa.h"
#include "op_kernels/common/numbers.h"
#include "op_kernels/common/row_steps.h"

namespace rec_sdk {
namespace REC_SDK_ISA {

// The values of an optimizer without row states or measures.
struct NoValues {};

template <int kPass>
struct Pass {
  static constexpr int kNumber = kPass;
};

// Each element by itself.
struct ElementwiseOptimizer {
  static constexpr int kRowStates = 0, kMeasures = 0, kSums = 0, kValues = 0;
  static constexpr bool kMeasuresRecord = false;

  template <class T>
  constexpr REC_SDK_HD void advance(T*, const T&) const {}
};

// One pass, over the gradient alone: its mean square.
struct MeanSquareOptimizer {
  static constexpr int kMeasures = 1, kSums = 1, kValues = 1;
  static constexpr bool kMeasuresRecord = false;

  template <class T>
  constexpr REC_SDK_HD Numbers<T, 1> measure(Pass<0>, const T&, const T*, const T& g, NoValues) const {
    return {{g * g}};
  }
};

// A norm that a formula divides by is at least this, so that 0 / 0 is 0. All norms whose square is not 0 are
// larger; a smaller number would make a step that is too small for its square a large one.
constexpr float kLeastNorm = 3e-23f;

// The largest finite number.
constexpr float kLargest = 3.402823466e+38f;

// Moving averages of the gradient and of its square. They decay before the new value is added: in the form
// average + (1 - beta) * (value - average) a large average takes the digits of a small value with it, however
// small beta is, and one that has overflowed becomes a NaN.
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
  // The square is taken last, since the gradient's may overflow where its share does not.
  template <class T>
  constexpr REC_SDK_HD void second(T* average, const T& g) const {
    *average *= beta2;
    *average += one_minus_beta2 * g * g;
  }
  // One average a row: of the mean of `dim` squares.
  template <class T>
  constexpr REC_SDK_HD void second(T* average, const T& squares, float dim) const {
    *average *= beta2;
    *average += squares / dim * one_minus_beta2;
  }
};

}  // namespace REC_SDK_ISA
}  // namespace rec_sdk
