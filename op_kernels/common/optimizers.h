// The optimizers; optimizer_base.h describes their members. To add one, write its struct and add it to the
// list at the end.
#pragma once

#include "op_kernels/common/optimizer_base.h"
#include "op_kernels/common/rowwise_adagrad.h"

namespace rec_sdk {
namespace REC_SDK_ISA {

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

// Optimizer Base with weight decay: l2 * weight is added to the gradient first, as in torch's optimizers.
// Base is elementwise and an odd function of the gradient. So an update with `maximize` keeps the gradient's
// sign and negates l2 and one coefficient of Base. kPlace: index of the coefficient l2, after Base's
// coefficients.
template <class Base, int kPlace>
struct WithL2 : Base {
  float l2;
  explicit constexpr REC_SDK_HD WithL2(const float* c) : Base(c), l2(c[kPlace]) {}

  template <class T>
  constexpr REC_SDK_HD void advance(T*, const T&) const {}
  template <class T>
  constexpr REC_SDK_HD void element(T& w, T* states, const T& g, NoValues values) const {
    const T decayed = g + l2 * w;
    Base::advance(states, decayed);
    Base::element(w, states, decayed, values);
  }
};

struct DecayedSgd : WithL2<Sgd, 2> {
  static const char* name() { return "decayed_sgd"; }
  static const char* coefficients() { return "lr l2"; }
  explicit constexpr REC_SDK_HD DecayedSgd(const float* c) : WithL2(c) {}
};

// torch.optim.SGD with momentum. The step is of_gradient * gradient + of_buffer * buffer: the buffer alone,
// or both terms with Nesterov's momentum. sign is -1 with `maximize`. kept is momentum and taken is 1 -
// dampening, but 1 in the first update. If momentum is 0, the step is the gradient alone, and the buffer does
// not change.
struct MomentumSgd : ElementwiseOptimizer {
  static const char* name() { return "momentum_sgd"; }
  static const char* coefficients() { return "lr sign weight_decay kept taken of_gradient of_buffer"; }
  static constexpr int kElementStates = 1;  // momentum_buffer

  float lr, sign, weight_decay, kept, taken, of_gradient, of_buffer;
  explicit constexpr REC_SDK_HD MomentumSgd(const float* c)
      : lr(c[1]),
        sign(c[2]),
        weight_decay(c[3]),
        kept(c[4]),
        taken(c[5]),
        of_gradient(c[6]),
        of_buffer(c[7]) {}

  template <class T>
  constexpr REC_SDK_HD void element(T& w, T* states, const T& g, NoValues) const {
    const T decayed = sign * g + weight_decay * w;
    states[0] *= kept;
    states[0] += taken * decayed;
    w -= lr * (of_gradient * decayed + of_buffer * states[0]);
  }
};

// SGD with momentum and a learning rate per row, which is proportional to the norm of the weight divided by
// the norm of the gradient.
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
    return {{scaled_lr * length / at_least(sqrtf(sums.each[1]) + weight_decay * length, kLeastNorm)}};
  }
  template <class T>
  constexpr REC_SDK_HD void element(T& w, T* states, const T& g, const Numbers<T, 1>& rate) const {
    states[0] *= momentum;
    states[0] += rate.each[0] * (g + weight_decay * w);
    w -= states[0];
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
    w -= lr * (g / (sqrtf(states[0]) + eps));
  }
};

struct DecayedAdagrad : WithL2<Adagrad, 3> {
  static const char* name() { return "decayed_adagrad"; }
  static const char* coefficients() { return "lr eps l2"; }
  explicit constexpr REC_SDK_HD DecayedAdagrad(const float* c) : WithL2(c) {}
};

// torch.optim.Adadelta: the gradient is divided by the root of the moving average of squared gradients, and
// multiplied by the root of the moving average of squared earlier steps.
struct Adadelta : ElementwiseOptimizer {
  static const char* name() { return "adadelta"; }
  static const char* coefficients() { return "lr eps rho one_minus_rho"; }
  static constexpr int kElementStates = 2;  // square_avg, acc_delta

  float lr, eps, rho, one_minus_rho;
  explicit constexpr REC_SDK_HD Adadelta(const float* c)
      : lr(c[1]), eps(c[2]), rho(c[3]), one_minus_rho(c[4]) {}

  template <class T>
  constexpr REC_SDK_HD void advance(T* states, const T& g) const {
    join(&states[0], g);
  }
  template <class T>
  constexpr REC_SDK_HD void element(T& w, T* states, const T& g, NoValues) const {
    const T delta = sqrtf(states[1] + eps) / sqrtf(states[0] + eps) * g;
    join(&states[1], delta);
    w -= lr * delta;
  }

 private:
  template <class T>
  constexpr REC_SDK_HD void join(T* average, const T& value) const {
    *average *= rho;
    *average += one_minus_rho * value * value;
  }
};

struct DecayedAdadelta : WithL2<Adadelta, 5> {
  static const char* name() { return "decayed_adadelta"; }
  static const char* coefficients() { return "lr eps rho one_minus_rho l2"; }
  explicit constexpr REC_SDK_HD DecayedAdadelta(const float* c) : WithL2(c) {}
};

// torch.optim.Adam and SparseAdam: the two differ only in coefficients 1 and 7.
struct Adam : ElementwiseOptimizer {
  static const char* name() { return "adam"; }
  static const char* coefficients() {
    return "step_size eps beta1 one_minus_beta1 beta2 one_minus_beta2 inv_sqrt_bias_correction2";
  }
  static constexpr int kElementStates = 2;  // exp_avg, exp_avg_sq

  float step_size, eps;
  Moments moments;
  float inv_sqrt_bias_correction2;
  explicit constexpr REC_SDK_HD Adam(const float* c)
      : step_size(c[1]), eps(c[2]), moments(c + 3), inv_sqrt_bias_correction2(c[7]) {}

  template <class T>
  constexpr REC_SDK_HD void advance(T* states, const T& g) const {
    moments.first(&states[0], g);
    moments.second(&states[1], g);
  }
  template <class T>
  constexpr REC_SDK_HD void element(T& w, T* states, const T&, NoValues) const {
    w -= step_size * (states[0] / (sqrtf(states[1]) * inv_sqrt_bias_correction2 + eps));
  }
};

// torch.optim.Adam with weight decay.
struct DecayedAdam : WithL2<Adam, 8> {
  static const char* name() { return "decayed_adam"; }
  static const char* coefficients() {
    return "step_size eps beta1 one_minus_beta1 beta2 one_minus_beta2 inv_sqrt_bias_correction2 l2";
  }
  explicit constexpr REC_SDK_HD DecayedAdam(const float* c) : WithL2(c) {}
};

// torch.optim.AdamW: Adam with decoupled weight decay.
struct AdamW : Adam {
  static const char* name() { return "adamw"; }
  static const char* coefficients() {
    return "step_size eps beta1 one_minus_beta1 beta2 one_minus_beta2 inv_sqrt_bias_correction2 decoupled";
  }

  float kept;
  explicit constexpr REC_SDK_HD AdamW(const float* c) : Adam(c), kept(1.0f - c[8]) {}

  template <class T>
  constexpr REC_SDK_HD void element(T& w, T* states, const T& g, NoValues values) const {
    w *= kept;
    Adam::element(w, states, g, values);
  }
};

// Adam's moving averages, with both bias corrections as separate coefficients.
struct CorrectedMoments {
  float lr, eps;
  Moments moments;
  float inv_bias_correction1, inv_sqrt_bias_correction2;
  explicit constexpr REC_SDK_HD CorrectedMoments(const float* c)
      : lr(c[1]), eps(c[2]), moments(c + 3), inv_bias_correction1(c[7]), inv_sqrt_bias_correction2(c[8]) {}
};

// LAMB: the step of Adam with weight decay, scaled so that its norm is lr times the norm of the row's weight.
struct Lamb : CorrectedMoments {
  static const char* name() { return "lamb"; }
  static const char* coefficients() {
    return "lr eps beta1 one_minus_beta1 beta2 one_minus_beta2 inv_bias_correction1 "
           "inv_sqrt_bias_correction2 weight_decay";
  }
  static constexpr int kElementStates = 2, kRowStates = 0;  // exp_avg, exp_avg_sq
  static constexpr int kMeasures = 1, kSums = 2, kValues = 1;
  static constexpr bool kMeasuresRecord = true;

  float weight_decay;
  explicit constexpr REC_SDK_HD Lamb(const float* c) : CorrectedMoments(c), weight_decay(c[9]) {}

  template <class T>
  constexpr REC_SDK_HD void advance(T* states, const T& g) const {
    moments.first(&states[0], g);
    moments.second(&states[1], g);
  }
  template <class T>
  constexpr REC_SDK_HD Numbers<T, 2> measure(Pass<0>, const T& w, const T* states, const T&, NoValues) const {
    const T step = step_of(w, states);
    return {{w * w, step * step}};
  }
  template <class T>
  constexpr REC_SDK_HD Numbers<T, 1> begin_row(Pass<0>, T*, const Numbers<T, 2>& sums, float,
                                               NoValues) const {
    return {{lr * sqrtf(sums.each[0]) / at_least(sqrtf(sums.each[1]), kLeastNorm)}};
  }
  template <class T>
  constexpr REC_SDK_HD void element(T& w, T* states, const T&, const Numbers<T, 1>& rate) const {
    w -= rate.each[0] * step_of(w, states);
  }

 private:
  template <class T>
  constexpr REC_SDK_HD T step_of(const T& w, const T* states) const {
    return states[0] / (sqrtf(states[1]) * inv_sqrt_bias_correction2 + eps) * inv_bias_correction1 +
           w * weight_decay;
  }
};

// Adam with one exp_avg_sq per row, the average of the gradient's mean square; weight decay is decoupled.
struct PartialRowWiseAdam : MeanSquareOptimizer, CorrectedMoments {
  static const char* name() { return "partial_rowwise_adam"; }
  static const char* coefficients() {
    return "lr eps beta1 one_minus_beta1 beta2 one_minus_beta2 inv_bias_correction1 "
           "inv_sqrt_bias_correction2 decoupled";
  }
  static constexpr int kElementStates = 1, kRowStates = 1;  // exp_avg, exp_avg_sq

  float kept;
  explicit constexpr REC_SDK_HD PartialRowWiseAdam(const float* c) : CorrectedMoments(c), kept(1.0f - c[9]) {}

  template <class T>
  constexpr REC_SDK_HD void advance(T* states, const T& g) const {
    moments.first(&states[0], g);
  }
  template <class T>
  constexpr REC_SDK_HD Numbers<T, 1> begin_row(Pass<0>, T* row_states, const Numbers<T, 1>& sums, float dim,
                                               NoValues) const {
    moments.second(&row_states[0], sums.each[0], dim);
    return {{lr * inv_bias_correction1 / (sqrtf(row_states[0]) * inv_sqrt_bias_correction2 + eps)}};
  }
  template <class T>
  constexpr REC_SDK_HD void element(T& w, T* states, const T&, const Numbers<T, 1>& rate) const {
    w *= kept;
    w -= rate.each[0] * states[0];
  }
};

// LAMB with one exp_avg_sq per row. The first pass computes the denominator of the step, the second the norm
// of the step.
struct PartialRowWiseLamb : CorrectedMoments {
  static const char* name() { return "partial_rowwise_lamb"; }
  static const char* coefficients() { return Lamb::coefficients(); }
  static constexpr int kElementStates = 1, kRowStates = 1;  // exp_avg, exp_avg_sq
  static constexpr int kMeasures = 2, kSums = 2, kValues = 2;
  static constexpr bool kMeasuresRecord = true;

  float weight_decay;
  explicit constexpr REC_SDK_HD PartialRowWiseLamb(const float* c)
      : CorrectedMoments(c), weight_decay(c[9]) {}

  template <class T>
  constexpr REC_SDK_HD void advance(T* states, const T& g) const {
    moments.first(&states[0], g);
  }
  template <class T>
  constexpr REC_SDK_HD Numbers<T, 1> measure(Pass<0>, const T&, const T*, const T& g, NoValues) const {
    return {{g * g}};
  }
  template <class T>
  constexpr REC_SDK_HD Numbers<T, 1> begin_row(Pass<0>, T* row_states, const Numbers<T, 1>& sums, float dim,
                                               NoValues) const {
    moments.second(&row_states[0], sums.each[0], dim);
    return {{inv_bias_correction1 / (sqrtf(row_states[0]) * inv_sqrt_bias_correction2 + eps)}};
  }
  template <class T>
  constexpr REC_SDK_HD Numbers<T, 2> measure(Pass<1>, const T& w, const T* states, const T&,
                                             const Numbers<T, 1>& factor) const {
    const T step = factor.each[0] * states[0] + w * weight_decay;
    return {{w * w, step * step}};
  }
  // Returns both factors instead of their product, because the product may overflow where the step is 0.
  template <class T>
  constexpr REC_SDK_HD Numbers<T, 2> begin_row(Pass<1>, T*, const Numbers<T, 2>& sums, float,
                                               const Numbers<T, 1>& factor) const {
    return {{lr * sqrtf(sums.each[0]) / at_least(sqrtf(sums.each[1]), kLeastNorm), factor.each[0]}};
  }
  template <class T>
  constexpr REC_SDK_HD void element(T& w, T* states, const T&, const Numbers<T, 2>& row) const {
    w -= row.each[0] * (row.each[1] * states[0] + w * weight_decay);
  }
};

// torch.optim.RMSprop, with or without momentum. kCentered: the step is divided by the root of the variance,
// else by the root of the average square.
template <bool kMomentum, bool kCentered>
struct RmsProp : ElementwiseOptimizer {
  static const char* name() {
    if constexpr (kCentered) return kMomentum ? "centered_momentum_rmsprop" : "centered_rmsprop";
    return kMomentum ? "momentum_rmsprop" : "rmsprop";
  }
  static const char* coefficients() {
    return kMomentum ? "lr eps alpha one_minus_alpha sign weight_decay momentum"
                     : "lr eps alpha one_minus_alpha sign weight_decay";
  }
  static constexpr int kMomentumStates = kMomentum ? 1 : 0, kAverages = kCentered ? 1 : 0;
  static constexpr int kElementStates =
      1 + kMomentumStates + kAverages;  // square_avg, momentum_buffer, grad_avg

  float lr, eps, alpha, one_minus_alpha, sign, weight_decay, momentum;
  explicit constexpr REC_SDK_HD RmsProp(const float* c)
      : lr(c[1]),
        eps(c[2]),
        alpha(c[3]),
        one_minus_alpha(c[4]),
        sign(c[5]),
        weight_decay(c[6]),
        momentum(c[7]) {}

  template <class T>
  constexpr REC_SDK_HD void element(T& w, T* states, const T& g, NoValues) const {
    const T decayed = sign * g + weight_decay * w;
    if constexpr (kMomentum) {
      const T step = decayed / size_of(states, decayed);
      states[1] *= momentum;
      states[1] += step;
      w -= lr * states[1];
    } else {
      w -= lr * (decayed / size_of(states, decayed));
    }
  }

 private:
  // Updates the averages with the gradient, and returns the denominator of the step. The variance is the new
  // square_avg - grad_avg * grad_avg. It is computed from the old averages, which is more accurate and never
  // negative.
  template <class T>
  constexpr REC_SDK_HD T size_of(T* states, const T& decayed) const {
    if constexpr (kCentered) {
      T& average = states[kElementStates - 1];
      const T distance = decayed - average;
      const T variance = alpha * (at_least(states[0] - at_most(average * average, kLargest), 0.0f) +
                                  one_minus_alpha * distance * distance);
      join_squares(states, decayed);
      average *= alpha;
      average += one_minus_alpha * decayed;
      return sqrtf(variance) + eps;
    } else {
      join_squares(states, decayed);
      return sqrtf(states[0]) + eps;
    }
  }
  template <class T>
  constexpr REC_SDK_HD void join_squares(T* states, const T& decayed) const {
    states[0] *= alpha;
    states[0] += one_minus_alpha * decayed * decayed;
  }
};

template <class... Optimizer>
struct OptimizerList {};

using Optimizers = OptimizerList<   //
    Sgd,                            //
    DecayedSgd,                     //
    MomentumSgd,                    //
    LarsSgd,                        //
    Adagrad,                        //
    DecayedAdagrad,                 //
    RowWiseAdagrad,                 //
    DecayedRowWiseAdagrad,          //
    BoundedRowWiseAdagrad,          //
    EnsembleRowWiseAdagrad,         //
    GloballyDecayedRowWiseAdagrad,  //
    CowClipRowWiseAdagrad,          //
    CountedRowWiseAdagrad,          //
    CountedAdagradW,                //
    Adam,                           //
    DecayedAdam,                    //
    AdamW,                          //
    PartialRowWiseAdam,             //
    RmsProp<false, false>,          //
    RmsProp<true, false>,           //
    RmsProp<false, true>,           //
    RmsProp<true, true>,            //
    Adadelta,                       //
    DecayedAdadelta,                //
    Lamb,                           //
    PartialRowWiseLamb>;

// Elementwise clipping of the aggregated gradient; a NaN stays a NaN.
REC_SDK_HD float clip(float g, float max_gradient) {
  const float below = max_gradient < g ? max_gradient : g;
  return below < -max_gradient ? -max_gradient : below;
}

}  // namespace REC_SDK_ISA
}  // namespace rec_sdk
