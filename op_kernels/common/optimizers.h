// Optimizer formulas, elementwise. Each struct serves every backend of this language: the CPU loop vectorises
// it, a CUDA thread calls it, and AscendC runs it on a tile of rows at once. To add an optimizer: write its
// struct and add it to the list at the end.
//
// An optimizer has
//   name()                           as the operator's `optimizer` argument names it; for the host
//   kElementStates, kRowStates       fp32 states of [dim], then of [1], in the order of the record
//   kMeanSquare                      whether begin_row needs the mean of g * g over the row
//   Optimizer(coefficients)          of one table; [0] is max_gradient, common to all
//   begin_row(row_states, mean)      updates the [1] states; what it returns goes to every element of the row
//   element(w, states, g, row)       updates one weight and its [dim] states from the aggregated gradient
//
// T is float, or a plane of floats (ascendc/planes.h): the formulas use + - * / and sqrtf, no branches, and
// name an intermediate result only where it is used twice. constexpr: the planes that they need are counted
// while the kernels are compiled (ascendc/plane_count.h).
#pragma once

#include <math.h>

#include <cstdint>

#include "op_kernels/common/isa.h"

namespace rec_sdk {
namespace REC_SDK_ISA {

// Most optimizers have nothing for the row as a whole.
struct NoRow {};

struct ElementwiseOptimizer {
  static constexpr int kRowStates = 0;
  static constexpr bool kMeanSquare = false;

  template <class T>
  constexpr REC_SDK_HD NoRow begin_row(T*, const T&) const {
    return {};
  }
};

struct Sgd : ElementwiseOptimizer {
  static const char* name() { return "sgd"; }
  static constexpr int kElementStates = 0;

  float lr;
  explicit constexpr REC_SDK_HD Sgd(const float* c) : lr(c[1]) {}

  template <class T>
  constexpr REC_SDK_HD void element(T& w, T*, const T& g, NoRow) const {
    w -= lr * g;
  }
};

struct Adagrad : ElementwiseOptimizer {
  static const char* name() { return "adagrad"; }
  static constexpr int kElementStates = 1;  // sum

  float lr, eps;  // lr: already decayed
  explicit constexpr REC_SDK_HD Adagrad(const float* c) : lr(c[1]), eps(c[2]) {}

  template <class T>
  constexpr REC_SDK_HD void element(T& w, T* states, const T& g, NoRow) const {
    states[0] += g * g;
    w -= lr * g / (sqrtf(states[0]) + eps);
  }
};

struct RowWiseAdagrad {
  static const char* name() { return "rowwise_adagrad"; }
  static constexpr int kElementStates = 0, kRowStates = 1;  // sum
  static constexpr bool kMeanSquare = true;

  float lr, eps;
  explicit constexpr REC_SDK_HD RowWiseAdagrad(const float* c) : lr(c[1]), eps(c[2]) {}

  template <class T>
  constexpr REC_SDK_HD T begin_row(T* row_states, const T& mean_square) const {
    row_states[0] += mean_square;
    return lr / (sqrtf(row_states[0]) + eps);
  }
  template <class T>
  constexpr REC_SDK_HD void element(T& w, T*, const T& g, const T& rate) const {
    w -= rate * g;
  }
};

// torch.optim.Adam and SparseAdam: they differ only in coefficients 1 and 5.
struct Adam : ElementwiseOptimizer {
  static const char* name() { return "adam"; }
  static constexpr int kElementStates = 2;  // exp_avg, exp_avg_sq

  float step_size, eps, one_minus_beta1, one_minus_beta2, inv_sqrt_bias_correction2;
  explicit constexpr REC_SDK_HD Adam(const float* c)
      : step_size(c[1]),
        eps(c[2]),
        one_minus_beta1(c[3]),
        one_minus_beta2(c[4]),
        inv_sqrt_bias_correction2(c[5]) {}

  template <class T>
  constexpr REC_SDK_HD void element(T& w, T* states, const T& g, NoRow) const {
    states[0] += (g - states[0]) * one_minus_beta1;
    states[1] += (g * g - states[1]) * one_minus_beta2;
    w -= step_size * states[0] / (sqrtf(states[1]) * inv_sqrt_bias_correction2 + eps);
  }
};

template <class... Optimizer>
struct OptimizerList {};

using Optimizers = OptimizerList<  //
    Sgd,                           //
    Adagrad,                       //
    RowWiseAdagrad,                //
    Adam>;

// Elementwise clipping of the aggregated gradient; a NaN stays a NaN.
REC_SDK_HD float clip(float g, float max_gradient) {
  const float below = max_gradient < g ? max_gradient : g;
  return below < -max_gradient ? -max_gradient : below;
}

}  // namespace REC_SDK_ISA
}  // namespace rec_sdk
