// What an optimizer formula is. Each struct serves every backend of this language: the CPU loop vectorises
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

// What an optimizer without row states or measures knows of the row as a whole.
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

// 0 / 0 is 0: norms of rows that are not zero are larger by far, and not changed by this.
constexpr float kTinyNorm = 1e-30f;

}  // namespace REC_SDK_ISA
}  // namespace rec_sdk
