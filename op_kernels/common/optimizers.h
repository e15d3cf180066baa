// Optimizer formulas. Each struct serves every backend of this language: the CPU loop vectorises it, a CUDA
// thread calls it, and AscendC runs it on a tile of rows at once. To add an optimizer: write its struct and
// add it to the list at the end.
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

struct Sgd : ElementwiseOptimizer {
  static const char* name() { return "sgd"; }
  static const char* coefficients() { return "lr"; }
  static constexpr int kElementStates = 0;

  float lr;
  explicit constexpr REC_SDK_HD Sgd(const float* c) : lr(c[1]) {}

  template <class T>
  constexpr REC_SDK_HD void element(T& w, T*, const T& g, NoValues) const {
    w -= lr * g;
  }
};

struct Adagrad : ElementwiseOptimizer {
  static const char* name() { return "adagrad"; }
  static const char* coefficients() { return "lr eps"; }
  static constexpr int kElementStates = 1;  // sum

  float lr, eps;  // lr: already decayed
  explicit constexpr REC_SDK_HD Adagrad(const float* c) : lr(c[1]), eps(c[2]) {}

  template <class T>
  constexpr REC_SDK_HD void advance(T* states, const T& g) const {
    states[0] += g * g;
  }
  template <class T>
  constexpr REC_SDK_HD void element(T& w, T* states, const T& g, NoValues) const {
    w -= lr * g / (sqrtf(states[0]) + eps);
  }
};

struct RowWiseAdagrad : MeanSquareOptimizer {
  static const char* name() { return "rowwise_adagrad"; }
  static const char* coefficients() { return "lr eps"; }
  static constexpr int kElementStates = 0, kRowStates = 1;  // sum

  float lr, eps;
  explicit constexpr REC_SDK_HD RowWiseAdagrad(const float* c) : lr(c[1]), eps(c[2]) {}

  template <class T>
  constexpr REC_SDK_HD void advance(T*, const T&) const {}
  template <class T>
  constexpr REC_SDK_HD Numbers<T, 1> begin_row(Pass<0>, T* row_states, const Numbers<T, 1>& sums, float dim,
                                               NoValues) const {
    row_states[0] += sums.each[0] / dim;
    return {{lr / (sqrtf(row_states[0]) + eps)}};
  }
  template <class T>
  constexpr REC_SDK_HD void element(T& w, T*, const T& g, const Numbers<T, 1>& rate) const {
    w -= rate.each[0] * g;
  }
};

// Weight decay of FBGEMM's exact row-wise Adagrad. L2: the gradient that is squared has the decay; decoupled:
// it has not. Either way the weight shrinks by a factor, of coefficients so that one formula serves both:
// 1 - rate * l2 - decoupled.
struct DecayedRowWiseAdagrad {
  static const char* name() { return "decayed_rowwise_adagrad"; }
  static const char* coefficients() { return "lr eps l2 decoupled"; }
  static constexpr int kElementStates = 0, kRowStates = 1;  // sum
  static constexpr int kMeasures = 1, kSums = 1, kValues = 2;
  static constexpr bool kMeasuresRecord = true;

  float lr, eps, l2, kept;
  explicit constexpr REC_SDK_HD DecayedRowWiseAdagrad(const float* c)
      : lr(c[1]), eps(c[2]), l2(c[3]), kept(1.0f - c[4]) {}

  template <class T>
  constexpr REC_SDK_HD void advance(T*, const T&) const {}
  template <class T>
  constexpr REC_SDK_HD Numbers<T, 1> measure(Pass<0>, const T& w, const T*, const T& g, NoValues) const {
    const T decayed = g + l2 * w;
    return {{decayed * decayed}};
  }
  template <class T>
  constexpr REC_SDK_HD Numbers<T, 2> begin_row(Pass<0>, T* row_states, const Numbers<T, 1>& sums, float dim,
                                               NoValues) const {
    row_states[0] += sums.each[0] / dim;
    return {{lr / (sqrtf(row_states[0]) + eps), kept - l2 * (lr / (sqrtf(row_states[0]) + eps))}};
  }
  template <class T>
  constexpr REC_SDK_HD void element(T& w, T*, const T& g, const Numbers<T, 2>& row) const {
    w *= row.each[1];
    w -= row.each[0] * g;
  }
};

// The update of DecayedRowWiseAdagrad, and then the row is no longer than max_norm.
struct BoundedRowWiseAdagrad {
  static const char* name() { return "bounded_rowwise_adagrad"; }
  static const char* coefficients() { return "lr eps l2 decoupled max_norm"; }
  static constexpr int kElementStates = 0, kRowStates = 1;  // sum
  static constexpr int kMeasures = 2, kSums = 1, kValues = 2;
  static constexpr bool kMeasuresRecord = true;

  DecayedRowWiseAdagrad adagrad;
  float max_norm;
  explicit constexpr REC_SDK_HD BoundedRowWiseAdagrad(const float* c) : adagrad(c), max_norm(c[5]) {}

  template <class T>
  constexpr REC_SDK_HD void advance(T*, const T&) const {}
  template <class T>
  constexpr REC_SDK_HD Numbers<T, 1> measure(Pass<0> pass, const T& w, const T* states, const T& g,
                                             NoValues values) const {
    return adagrad.measure(pass, w, states, g, values);
  }
  template <class T>
  constexpr REC_SDK_HD Numbers<T, 2> begin_row(Pass<0> pass, T* row_states, const Numbers<T, 1>& sums,
                                               float dim, NoValues values) const {
    return adagrad.begin_row(pass, row_states, sums, dim, values);
  }
  template <class T>
  constexpr REC_SDK_HD Numbers<T, 1> measure(Pass<1>, const T& w, const T*, const T& g,
                                             const Numbers<T, 2>& row) const {
    const T updated = w * row.each[1] - row.each[0] * g;
    return {{updated * updated}};
  }
  template <class T>
  constexpr REC_SDK_HD Numbers<T, 2> begin_row(Pass<1>, T*, const Numbers<T, 1>& sums, float,
                                               const Numbers<T, 2>& row) const {
    const T factor = at_most(max_norm / (sqrtf(sums.each[0]) + kTinyNorm), 1.0f);
    return {{row.each[0] * factor, row.each[1] * factor}};
  }
  template <class T>
  constexpr REC_SDK_HD void element(T& w, T* states, const T& g, const Numbers<T, 2>& row) const {
    adagrad.element(w, states, g, row);
  }
};

// Decoupled decay also for the updates that the row missed, but of these by no factor below lower_bound.
struct GloballyDecayedRowWiseAdagrad : MeanSquareOptimizer {
  static const char* name() { return "globally_decayed_rowwise_adagrad"; }
  static const char* coefficients() { return "lr eps decoupled log_missed lower_bound iter"; }
  static constexpr int kElementStates = 0, kRowStates = 2, kValues = 2;  // sum, prev_iter

  float lr, eps, kept, log_missed, lower_bound, iter;
  explicit constexpr REC_SDK_HD GloballyDecayedRowWiseAdagrad(const float* c)
      : lr(c[1]), eps(c[2]), kept(1.0f - c[3]), log_missed(c[4]), lower_bound(c[5]), iter(c[6]) {}

  template <class T>
  constexpr REC_SDK_HD void advance(T*, const T&) const {}
  template <class T>
  constexpr REC_SDK_HD Numbers<T, 2> begin_row(Pass<0>, T* row_states, const Numbers<T, 1>& sums, float dim,
                                               NoValues) const {
    row_states[0] += sums.each[0] / dim;
    const T missed = expm1_of_steps(&row_states[1], iter, 1.0f, log_missed);
    return {{lr / (sqrtf(row_states[0]) + eps), at_least(missed + 1.0f, lower_bound) * kept}};
  }
  template <class T>
  constexpr REC_SDK_HD void element(T& w, T*, const T& g, const Numbers<T, 2>& row) const {
    w *= row.each[1];
    w -= row.each[0] * g;
  }
};

// The gradient is cut to a length in proportion to that of the weight and to how often the row was updated,
// a count that fades: log_fade is the logarithm of what one update leaves of it.
struct CowClipRowWiseAdagrad {
  static const char* name() { return "cowclip_rowwise_adagrad"; }
  static const char* coefficients() {
    return "lr eps l2 decoupled log_fade weight_norm_coefficient lower_bound iter";
  }
  static constexpr int kElementStates = 0, kRowStates = 3;  // sum, prev_iter, row_counter
  static constexpr int kMeasures = 1, kSums = 2, kValues = 2;
  static constexpr bool kMeasuresRecord = true;

  float lr, eps, l2, kept, log_fade, weight_norm_coefficient, lower_bound, iter;
  explicit constexpr REC_SDK_HD CowClipRowWiseAdagrad(const float* c)
      : lr(c[1]),
        eps(c[2]),
        l2(c[3]),
        kept(1.0f - c[4]),
        log_fade(c[5]),
        weight_norm_coefficient(c[6]),
        lower_bound(c[7]),
        iter(c[8]) {}

  template <class T>
  constexpr REC_SDK_HD void advance(T*, const T&) const {}
  template <class T>
  constexpr REC_SDK_HD Numbers<T, 2> measure(Pass<0>, const T& w, const T*, const T& g, NoValues) const {
    const T decayed = g + l2 * w;
    return {{decayed * decayed, w * w}};
  }
  template <class T>
  constexpr REC_SDK_HD Numbers<T, 2> begin_row(Pass<0>, T* row_states, const Numbers<T, 2>& sums, float dim,
                                               NoValues) const {
    row_states[0] += sums.each[0] / dim;
    row_states[2] += row_states[2] * expm1_of_steps(&row_states[1], iter, 0.0f, log_fade) + 1.0f;
    const T rate =
        at_most(row_states[2] * at_least(sqrtf(sums.each[1]) * weight_norm_coefficient, lower_bound) /
                    (sqrtf(sums.each[0]) + kTinyNorm),
                1.0f) *
        lr / (sqrtf(row_states[0]) + eps);
    return {{rate, kept - l2 * rate}};
  }
  template <class T>
  constexpr REC_SDK_HD void element(T& w, T*, const T& g, const Numbers<T, 2>& row) const {
    w *= row.each[1];
    w -= row.each[0] * g;
  }
};

// torch.optim.Adam and SparseAdam: they differ only in coefficients 1 and 5.
struct Adam : ElementwiseOptimizer {
  static const char* name() { return "adam"; }
  static const char* coefficients() {
    return "step_size eps one_minus_beta1 one_minus_beta2 inv_sqrt_bias_correction2";
  }
  static constexpr int kElementStates = 2;  // exp_avg, exp_avg_sq

  float step_size, eps, one_minus_beta1, one_minus_beta2, inv_sqrt_bias_correction2;
  explicit constexpr REC_SDK_HD Adam(const float* c)
      : step_size(c[1]),
        eps(c[2]),
        one_minus_beta1(c[3]),
        one_minus_beta2(c[4]),
        inv_sqrt_bias_correction2(c[5]) {}

  template <class T>
  constexpr REC_SDK_HD void advance(T* states, const T& g) const {
    states[0] += (g - states[0]) * one_minus_beta1;
    states[1] += (g * g - states[1]) * one_minus_beta2;
  }
  template <class T>
  constexpr REC_SDK_HD void element(T& w, T* states, const T&, NoValues) const {
    w -= step_size * states[0] / (sqrtf(states[1]) * inv_sqrt_bias_correction2 + eps);
  }
};

// The step of Adam with decay, as long as the weight is long.
struct Lamb {
  static const char* name() { return "lamb"; }
  static const char* coefficients() {
    return "lr eps one_minus_beta1 one_minus_beta2 inv_bias_correction1 inv_sqrt_bias_correction2 "
           "weight_decay";
  }
  static constexpr int kElementStates = 2, kRowStates = 0;  // exp_avg, exp_avg_sq
  static constexpr int kMeasures = 1, kSums = 2, kValues = 1;
  static constexpr bool kMeasuresRecord = true;

  Adam adam;  // of its states
  float lr, eps, inv_bias_correction1, inv_sqrt_bias_correction2, weight_decay;
  explicit constexpr REC_SDK_HD Lamb(const float* c)
      : adam(c),
        lr(c[1]),
        eps(c[2]),
        inv_bias_correction1(c[5]),
        inv_sqrt_bias_correction2(c[6]),
        weight_decay(c[7]) {}

  template <class T>
  constexpr REC_SDK_HD void advance(T* states, const T& g) const {
    adam.advance(states, g);
  }
  template <class T>
  constexpr REC_SDK_HD Numbers<T, 2> measure(Pass<0>, const T& w, const T* states, const T&, NoValues) const {
    const T step = step_of(w, states);
    return {{w * w, step * step}};
  }
  template <class T>
  constexpr REC_SDK_HD Numbers<T, 1> begin_row(Pass<0>, T*, const Numbers<T, 2>& sums, float,
                                               NoValues) const {
    return {{lr * sqrtf(sums.each[0]) / (sqrtf(sums.each[1]) + kTinyNorm)}};
  }
  template <class T>
  constexpr REC_SDK_HD void element(T& w, T* states, const T&, const Numbers<T, 1>& rate) const {
    w -= rate.each[0] * step_of(w, states);
  }

 private:
  template <class T>
  constexpr REC_SDK_HD T step_of(const T& w, const T* states) const {
    return states[0] * inv_bias_correction1 / (sqrtf(states[1]) * inv_sqrt_bias_correction2 + eps) +
           w * weight_decay;
  }
};

// Adam with one exp_avg_sq a row, of the mean of squares; decay is decoupled.
struct PartialRowWiseAdam : MeanSquareOptimizer {
  static const char* name() { return "partial_rowwise_adam"; }
  static const char* coefficients() {
    return "lr eps one_minus_beta1 one_minus_beta2 inv_bias_correction1 inv_sqrt_bias_correction2 "
           "weight_decay";
  }
  static constexpr int kElementStates = 1, kRowStates = 1;  // exp_avg, exp_avg_sq

  float lr, eps, one_minus_beta1, one_minus_beta2, inv_bias_correction1, inv_sqrt_bias_correction2, kept;
  explicit constexpr REC_SDK_HD PartialRowWiseAdam(const float* c)
      : lr(c[1]),
        eps(c[2]),
        one_minus_beta1(c[3]),
        one_minus_beta2(c[4]),
        inv_bias_correction1(c[5]),
        inv_sqrt_bias_correction2(c[6]),
        kept(1.0f - c[1] * c[7]) {}

  template <class T>
  constexpr REC_SDK_HD void advance(T* states, const T& g) const {
    states[0] += (g - states[0]) * one_minus_beta1;
  }
  template <class T>
  constexpr REC_SDK_HD Numbers<T, 1> begin_row(Pass<0>, T* row_states, const Numbers<T, 1>& sums, float dim,
                                               NoValues) const {
    row_states[0] += (sums.each[0] / dim - row_states[0]) * one_minus_beta2;
    return {{lr * inv_bias_correction1 / (sqrtf(row_states[0]) * inv_sqrt_bias_correction2 + eps)}};
  }
  template <class T>
  constexpr REC_SDK_HD void element(T& w, T* states, const T&, const Numbers<T, 1>& rate) const {
    w *= kept;
    w -= rate.each[0] * states[0];
  }
};

// LAMB with one exp_avg_sq a row. The first pass gives the denominator of the step, the second its length.
struct PartialRowWiseLamb {
  static const char* name() { return "partial_rowwise_lamb"; }
  static const char* coefficients() { return PartialRowWiseAdam::coefficients(); }
  static constexpr int kElementStates = 1, kRowStates = 1;  // exp_avg, exp_avg_sq
  static constexpr int kMeasures = 2, kSums = 2, kValues = 2;
  static constexpr bool kMeasuresRecord = true;

  PartialRowWiseAdam adam;  // of its states
  float weight_decay;
  explicit constexpr REC_SDK_HD PartialRowWiseLamb(const float* c) : adam(c), weight_decay(c[7]) {}

  template <class T>
  constexpr REC_SDK_HD void advance(T* states, const T& g) const {
    adam.advance(states, g);
  }
  template <class T>
  constexpr REC_SDK_HD Numbers<T, 1> measure(Pass<0>, const T&, const T*, const T& g, NoValues) const {
    return {{g * g}};
  }
  template <class T>
  constexpr REC_SDK_HD Numbers<T, 1> begin_row(Pass<0>, T* row_states, const Numbers<T, 1>& sums, float dim,
                                               NoValues) const {
    row_states[0] += (sums.each[0] / dim - row_states[0]) * adam.one_minus_beta2;
    return {{adam.inv_bias_correction1 / (sqrtf(row_states[0]) * adam.inv_sqrt_bias_correction2 + adam.eps)}};
  }
  template <class T>
  constexpr REC_SDK_HD Numbers<T, 2> measure(Pass<1>, const T& w, const T* states, const T&,
                                             const Numbers<T, 1>& factor) const {
    const T step = factor.each[0] * states[0] + w * weight_decay;
    return {{w * w, step * step}};
  }
  template <class T>
  constexpr REC_SDK_HD Numbers<T, 2> begin_row(Pass<1>, T*, const Numbers<T, 2>& sums, float,
                                               const Numbers<T, 1>& factor) const {
    const T rate = adam.lr * sqrtf(sums.each[0]) / (sqrtf(sums.each[1]) + kTinyNorm);
    return {{rate * factor.each[0], 1.0f - rate * weight_decay}};
  }
  template <class T>
  constexpr REC_SDK_HD void element(T& w, T* states, const T&, const Numbers<T, 2>& row) const {
    w *= row.each[1];
    w -= row.each[0] * states[0];
  }
};

// A rate in proportion to the length of the weight over that of the gradient, and momentum.
struct LarsSgd {
  static const char* name() { return "lars_sgd"; }
  static const char* coefficients() { return "scaled_lr momentum weight_decay"; }
  static constexpr int kElementStates = 1, kRowStates = 0;  // momentum_buffer
  static constexpr int kMeasures = 1, kSums = 2, kValues = 1;
  static constexpr bool kMeasuresRecord = true;

  float scaled_lr, momentum, weight_decay;  // scaled_lr: lr * eta
  explicit constexpr REC_SDK_HD LarsSgd(const float* c)
      : scaled_lr(c[1]), momentum(c[2]), weight_decay(c[3]) {}

  template <class T>
  constexpr REC_SDK_HD void advance(T*, const T&) const {}
  template <class T>
  constexpr REC_SDK_HD Numbers<T, 2> measure(Pass<0>, const T& w, const T*, const T& g, NoValues) const {
    return {{w * w, g * g}};
  }
  template <class T>
  constexpr REC_SDK_HD Numbers<T, 1> begin_row(Pass<0>, T*, const Numbers<T, 2>& sums, float,
                                               NoValues) const {
    const T length = sqrtf(sums.each[0]);
    return {{scaled_lr * length / (sqrtf(sums.each[1]) + weight_decay * length + kTinyNorm)}};
  }
  template <class T>
  constexpr REC_SDK_HD void element(T& w, T* states, const T& g, const Numbers<T, 1>& rate) const {
    states[0] *= momentum;
    states[0] += rate.each[0] * (g + weight_decay * w);
    w -= states[0];
  }
};

template <class... Optimizer>
struct OptimizerList {};

using Optimizers = OptimizerList<   //
    Sgd,                            //
    Adagrad,                        //
    RowWiseAdagrad,                 //
    DecayedRowWiseAdagrad,          //
    BoundedRowWiseAdagrad,          //
    GloballyDecayedRowWiseAdagrad,  //
    CowClipRowWiseAdagrad,          //
    Adam,                           //
    PartialRowWiseAdam,             //
    Lamb,                           //
    PartialRowWiseLamb,             //
    LarsSgd>;

// Elementwise clipping of the aggregated gradient; a NaN stays a NaN.
REC_SDK_HD float clip(float g, float max_gradient) {
  const float below = max_gradient < g ? max_gradient : g;
  return below < -max_gradient ? -max_gradient : below;
}

}  // namespace REC_SDK_ISA
}  // namespace rec_sdk
