// Row-wise Adagrad and the variants of FBGEMM's exact row-wise Adagrad. optimizer_base.h describes the
// members.
#pragma once

#include "op_kernels/common/optimizer_base.h"
#include "op_kernels/common/row_steps.h"

namespace rec_sdk {
namespace REC_SDK_ISA {

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

// Row-wise Adagrad with FBGEMM's weight decay. With L2 decay, the decay term is added to the gradient before
// the gradient is squared; with decoupled decay, it is not. In both cases the weight is multiplied by 1 -
// rate * l2 - decoupled. One formula serves both kinds of decay: the coefficient of the kind that is not used
// is 0.
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

// The update of DecayedRowWiseAdagrad, after which the row is scaled down if its norm exceeds max_norm.
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
    const T norm = at_most(at_least(sqrtf(sums.each[0]), kLeastNorm), kLargest);  // max_norm may be infinity
    const T factor = at_most(max_norm / norm, 1.0f);
    return {{row.each[0] * factor, row.each[1] * factor}};
  }
  template <class T>
  constexpr REC_SDK_HD void element(T& w, T* states, const T& g, const Numbers<T, 2>& row) const {
    adagrad.element(w, states, g, row);
  }
};

// BoundedRowWiseAdagrad with one more state: a moving average of the weight. The kernel does not change this
// state; the host does, between updates.
struct EnsembleRowWiseAdagrad : BoundedRowWiseAdagrad {
  static const char* name() { return "ensemble_rowwise_adagrad"; }
  static constexpr int kElementStates = 1;  // sparse_ema

  using BoundedRowWiseAdagrad::BoundedRowWiseAdagrad;
};

// Row-wise Adagrad whose decoupled decay also covers the updates that the row missed. The factor of the
// missed updates is at least lower_bound.
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

// Row-wise Adagrad that clips the norm of the gradient in proportion to the norm of the weight and to the
// count of the row's updates. The count decays; log_fade is the logarithm of its factor per update.
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
        at_most(at_most(row_states[2] * at_least(sqrtf(sums.each[1]) * weight_norm_coefficient, lower_bound),
                        kLargest) /
                    at_least(sqrtf(sums.each[0]), kLeastNorm),
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

// Row-wise Adagrad that depends on a count of the row's updates, which decays. If the count is above `tail`:
// - the rate is multiplied by max(max_counter / (count + 1), 1)^power, limited to [0.1, 10];
// - with counts = 1, `counted` times the count replaces the sum of squares.
// The weight decay faded_l2 and faded_decoupled is divided by the count.
struct CountedRowWiseAdagrad {
  static const char* name() { return "counted_rowwise_adagrad"; }
  static const char* coefficients() {
    return "lr eps l2 faded_l2 faded_decoupled log_fade power max_counter tail counts counted iter";
  }
  static constexpr int kElementStates = 0, kRowStates = 3;  // sum, prev_iter, row_counter
  static constexpr int kMeasures = 1, kSums = 1, kValues = 2;
  static constexpr bool kMeasuresRecord = true;

  float lr, eps, l2, faded_l2, faded_decoupled, log_fade, power, max_counter, tail, counts, counted, iter;
  float eps_of_decay, eps_of_count;  // 1 if unused; eps_of_count is never 0, to avoid 0 / 0
  explicit constexpr REC_SDK_HD CountedRowWiseAdagrad(const float* c)
      : lr(c[1]),
        eps(c[2]),
        l2(c[3]),
        faded_l2(c[4]),
        faded_decoupled(c[5]),
        log_fade(c[6]),
        power(c[7]),
        max_counter(c[8]),
        tail(c[9]),
        counts(c[10]),
        counted(c[11]),
        iter(c[12]),
        eps_of_decay(c[4] == 0.0f ? 1.0f : c[2]),
        eps_of_count(c[10] == 0.0f  ? 1.0f
                     : c[2] == 0.0f ? __FLT_DENORM_MIN__
                                    : c[2]) {}

  template <class T>
  constexpr REC_SDK_HD void advance(T*, const T&) const {}
  template <class T>
  constexpr REC_SDK_HD Numbers<T, 1> measure(Pass<0>, const T& w, const T*, const T& g, NoValues) const {
    const T decayed = g + l2 * w;
    return {{decayed * decayed}};
  }
  // Few planes fit into memory, so the returned values and prev_iter hold the intermediate results.
  template <class T>
  constexpr REC_SDK_HD Numbers<T, 2> begin_row(Pass<0>, T* row_states, const Numbers<T, 1>& sums, float dim,
                                               NoValues) const {
    T &sum = row_states[0], &scratch = row_states[1], &count = row_states[2];
    sum += sums.each[0] / dim;
    scratch = at_least(steps_since(scratch, iter) * log_fade, -80.0f) * (1.0f / 256);
    Numbers<T, 2> row{{scratch * (1.0f / 720), scratch * 0.0f}};
    T &rate = row.each[0], &kept = row.each[1];
    expm1_of_256_times(&rate, scratch);
    count += count * rate + 1.0f;

    scratch = at_least(max_counter / (count + 1.0f), 1.0f);
    logarithm(&rate, &scratch, &kept);
    constexpr float kLog10 = 2.302585093f;
    scratch = at_least(at_most(rate * power, kLog10), -kLog10) * (1.0f / 256);
    kept = above(count, tail);
    scratch *= kept;
    rate = scratch * (1.0f / 720);
    expm1_of_256_times(&rate, scratch);

    kept *= counts;  // 1 where the count replaces the sum, which may be 0 or infinite there
    scratch = lr / (sqrtf(sum) + kept + eps);
    scratch -= kept * scratch;
    scratch += kept * lr / (sqrtf(count * counted) + eps_of_count);
    rate = (rate + 1.0f) * scratch;
    scratch = faded_l2 * lr / (sqrtf(sum) + eps_of_decay) + faded_decoupled;
    kept = 1.0f - scratch / count;
    scratch = count * 0.0f + iter;
    return row;
  }
  template <class T>
  constexpr REC_SDK_HD void element(T& w, T*, const T& g, const Numbers<T, 2>& row) const {
    w *= row.each[1];
    w -= row.each[0] * g;
  }
};

// Row-wise Adagrad whose rate grows with the root of the count of the row's updates (by_root), or with the
// count itself (by_count), up to `bound`. Weight decay is decoupled. The rate and the decay also make up for
// the decay of updates that the row missed, at most most_steps of them.
struct CountedAdagradW : MeanSquareOptimizer {
  static const char* name() { return "counted_adagradw"; }
  static const char* coefficients() {
    return "lr eps decoupled log_missed most_steps log_fade by_root by_count bound iter";
  }
  static constexpr int kElementStates = 0, kRowStates = 3, kValues = 2;  // sum, prev_iter, row_counter

  float lr, eps, kept_now, log_missed, most_steps, log_fade, by_root, by_count, bound, iter;
  explicit constexpr REC_SDK_HD CountedAdagradW(const float* c)
      : lr(c[1]),
        eps(c[2]),
        kept_now(1.0f - c[3]),
        log_missed(c[4]),
        most_steps(c[5]),
        log_fade(c[6]),
        by_root(c[7]),
        by_count(c[8]),
        bound(c[9]),
        iter(c[10]) {}

  template <class T>
  constexpr REC_SDK_HD void advance(T*, const T&) const {}
  template <class T>
  constexpr REC_SDK_HD Numbers<T, 2> begin_row(Pass<0>, T* row_states, const Numbers<T, 1>& sums, float dim,
                                               NoValues) const {
    T &sum = row_states[0], &last = row_states[1], &count = row_states[2];
    sum += sums.each[0] / dim;
    Numbers<T, 2> row{{last * 0.0f, last * 0.0f}};
    T &rate = row.each[0], &kept = row.each[1];
    rate =
        at_least((at_most(steps_since(last, iter), most_steps) - 1.0f) * log_missed, -80.0f) * (1.0f / 256);
    kept = rate * (1.0f / 720);
    expm1_of_256_times(&kept, rate);

    last = at_least(steps_since(last, iter) * log_fade, -80.0f) * (1.0f / 256);
    rate = last * (1.0f / 720);
    expm1_of_256_times(&rate, last);
    count += count * rate + 1.0f;
    last = last * 0.0f + iter;

    rate = sqrtf(count) * by_root + (1.0f - by_root - by_count);
    rate = at_most((rate + count * by_count) * lr, bound) / (sqrtf(sum) + eps);
    rate *= kept + 1.0f;
    kept = (kept + 1.0f) * kept_now;
    return row;
  }
  template <class T>
  constexpr REC_SDK_HD void element(T& w, T*, const T& g, const Numbers<T, 2>& row) const {
    w *= row.each[1];
    w -= row.each[0] * g;
  }
};

}  // namespace REC_SDK_ISA
}  // namespace rec_sdk
