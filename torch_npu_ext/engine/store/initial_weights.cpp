#include "torch_npu_ext/engine/store/initial_weights.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>

#include "torch_npu_ext/engine/base/id_hash.h"
#include "torch_npu_ext/engine/base/philox.h"

namespace rec_sdk {
namespace {

constexpr double kTwoSigmaTail = 0.022750131948179195;  // scipy.stats.norm.cdf(-2)

// Returns the natural logarithm without libm, whose results differ between machines. The result is the
// exponent times ln 2 plus the logarithm of the mantissa, for which the series of 2 artanh converges quickly.
double logarithm(double value) {
  constexpr double kLn2 = 0.69314718055994530942;
  int exponent;
  double rest = std::frexp(value, &exponent);  // exact
  if (rest < 0.70710678118654752440) {
    rest *= 2;
    --exponent;
  }
  const double s = (rest - 1) / (rest + 1);
  double sum = 0;
  for (int power = 23; power > 0; power -= 2) sum = sum * s * s + 1.0 / power;
  return exponent * kLn2 + 2 * s * sum;
}

double polynomial(const std::array<double, 8>& coefficients, double x) {
  double sum = coefficients[7];
  for (int i = 6; i >= 0; --i) sum = sum * x + coefficients[i];
  return sum;
}

// The largest number of Philox counters that are advanced together. Each counter gives the numbers of four
// columns.
constexpr int kLanes = static_cast<int>(kDrawnColumns / 4);

// Draws the random numbers of 4 * lanes columns. Without the pragmas, GCC would unroll the loops before it
// vectorizes them.
template <int lanes>
REC_SDK_ALWAYS_INLINE void draw_numbers(std::array<uint32_t, 2> key, int64_t id, int64_t begin,
                                        uint32_t* numbers) {
  uint32_t c[4][lanes];
#pragma GCC unroll 1
  for (int l = 0; l < lanes; ++l) {
    c[0][l] = static_cast<uint32_t>(static_cast<uint64_t>(id));
    c[1][l] = static_cast<uint32_t>(static_cast<uint64_t>(id) >> 32);
    c[2][l] = static_cast<uint32_t>(begin / 4 + l);
    c[3][l] = 0;
  }
  for (int round = 0; round < kPhiloxRounds; ++round) {
#pragma GCC unroll 1
    for (int l = 0; l < lanes; ++l) philox_round(&c[0][l], &c[1][l], &c[2][l], &c[3][l], key);
    key = next_philox_key(key);
  }
#pragma GCC unroll 1
  for (int l = 0; l < lanes; ++l) {
    for (int k = 0; k < 4; ++k) numbers[4 * l + k] = c[k][l];
  }
}

// Returns random / 2^32 exactly. The number is converted as a signed integer, because instruction sets before
// AVX-512 cannot convert unsigned ones.
REC_SDK_ALWAYS_INLINE double unit(uint32_t random) {
  return (static_cast<double>(static_cast<int32_t>(random ^ 0x80000000u)) + 0x1p31) * 0x1p-32;
}

// Returns q * P(q^2) / Q(q^2) with q = p - 1/2. The coefficients are a rational least-squares fit of degree
// 5/5 (Loeb's iteration, 400 Chebyshev nodes in q^2) to sqrt(2) * erfinv(2q) / q, computed by mpmath with 40
// digits. The error against scipy.stats.norm.ppf, on 200,001 points of the range, is at most 2e-9.
REC_SDK_ALWAYS_INLINE double central_quantile(double p) {
  constexpr double kP[] = {2.5066283083560887, -31.115785678203682, 142.8943374461076,
                           -291.4276528068572, 240.69776012080533,  -45.75647768827851};
  constexpr double kQ[] = {1.0,
                           -13.46059790299751,
                           68.79948423190484,
                           -163.55898689140741,
                           174.20499308503997,
                           -61.04105275676097};
  const double q = p - 0.5;
  const double r = q * q;
  double numerator = kP[5];
  double denominator = kQ[5];
  for (int i = 4; i >= 0; --i) {
    numerator = numerator * r + kP[i];
    denominator = denominator * r + kQ[i];
  }
  return q * numerator / denominator;
}

REC_SDK_ALWAYS_INLINE double truncated_normal(uint32_t random) {
  const double x = central_quantile(kTwoSigmaTail + unit(random) * (1.0 - 2.0 * kTwoSigmaTail));
  const double above = x < -2.0 ? -2.0 : x;
  return above > 2.0 ? 2.0 : above;
}

template <int lanes>
REC_SDK_ALWAYS_INLINE void draw_block(const WeightDistribution& d, std::array<uint32_t, 2> key, int64_t id,
                                      int64_t begin, int64_t count, float* weights) {
  uint32_t numbers[4 * lanes];
  float drawn[4 * lanes];
  draw_numbers<lanes>(key, id, begin, numbers);
  const double offset = d.offset, scale = d.scale;  // copies of members, which GCC keeps in registers
  const float limit = d.limit, below = d.below;
  if (d.kind == WeightDistribution::Kind::kUniform) {
#pragma GCC unroll 1
    for (int i = 0; i < 4 * lanes; ++i) {
      const float weight = static_cast<float>(offset + unit(numbers[i]) * scale);
      drawn[i] = weight >= limit ? below : weight;
    }
  } else if (d.kind == WeightDistribution::Kind::kTruncatedNormal) {
#pragma GCC unroll 1
    for (int i = 0; i < 4 * lanes; ++i) {
      drawn[i] = static_cast<float>(offset + scale * truncated_normal(numbers[i]));
    }
  } else {
    for (int64_t i = 0; i < count; ++i) {
      const float weight = static_cast<float>(offset + scale * d.normal(unit(numbers[i])));
      drawn[i] = std::min(std::max(weight, below), limit);
    }
  }
  std::memcpy(weights, drawn, static_cast<size_t>(count) * sizeof(float));
}

REC_SDK_ALWAYS_INLINE void draw(const WeightDistribution& d, std::array<uint32_t, 2> key, int64_t id,
                                int64_t begin, int64_t count, float* weights) {
  if (count > kDrawnColumns / 2) return draw_block<kLanes>(d, key, id, begin, count, weights);
  if (count > kDrawnColumns / 4) return draw_block<kLanes / 2>(d, key, id, begin, count, weights);
  draw_block<kLanes / 4>(d, key, id, begin, count, weights);
}

void draw_baseline(const WeightDistribution& d, std::array<uint32_t, 2> key, int64_t id, int64_t begin,
                   int64_t count, float* weights) {
  draw(d, key, id, begin, count, weights);
}

}  // namespace

#ifdef __x86_64__
// Exported, so that the disassembly of the stripped library names them.
namespace x86_64_v3 {
__attribute__((target("avx2"), visibility("default"))) void draw_weights(const WeightDistribution& d,
                                                                         std::array<uint32_t, 2> key,
                                                                         int64_t id, int64_t begin,
                                                                         int64_t count, float* weights) {
  draw(d, key, id, begin, count, weights);
}
}  // namespace x86_64_v3
namespace x86_64_v4 {
__attribute__((target("avx512f,avx512dq,avx512vl,prefer-vector-width=512"), visibility("default"))) void
draw_weights(const WeightDistribution& d, std::array<uint32_t, 2> key, int64_t id, int64_t begin,
             int64_t count, float* weights) {
  draw(d, key, id, begin, count, weights);
}
}  // namespace x86_64_v4
#endif

std::vector<DrawWeights> weight_drawers() {
  std::vector<DrawWeights> drawers = {draw_baseline};
#ifdef __x86_64__
  if (__builtin_cpu_supports("avx2")) drawers.push_back(x86_64_v3::draw_weights);
  const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") &&
                      __builtin_cpu_supports("avx512vl");
  if (avx512) drawers.push_back(x86_64_v4::draw_weights);
#endif
  return drawers;
}

double central_normal_quantile(double p) { return central_quantile(p); }

// Implements routine PPND16 of Wichura's algorithm AS 241 (Applied Statistics 37, 1988).
double normal_quantile(double p) {
  constexpr std::array<double, 8> kA = {
      3.3871328727963666080,   1.3314166789178437745e2, 1.9715909503065514427e3, 1.3731693765509461125e4,
      4.5921953931549871457e4, 6.7265770927008700853e4, 3.3430575583588128105e4, 2.5090809287301226727e3};
  constexpr std::array<double, 8> kB = {1.0,
                                        4.2313330701600911252e1,
                                        6.8718700749205790830e2,
                                        5.3941960214247511077e3,
                                        2.1213794301586595867e4,
                                        3.9307895800092710610e4,
                                        2.8729085735721942674e4,
                                        5.2264952788528545610e3};
  constexpr std::array<double, 8> kC = {1.42343711074968357734,    4.63033784615654529590,
                                        5.76949722146069140550,    3.64784832476320460504,
                                        1.27045825245236838258,    2.41780725177450611770e-1,
                                        2.27238449892691845833e-2, 7.74545014278341407640e-4};
  constexpr std::array<double, 8> kD = {1.0,
                                        2.05319162663775882187,
                                        1.67638483018380384940,
                                        6.89767334985100004550e-1,
                                        1.48103976427480074590e-1,
                                        1.51986665636164571966e-2,
                                        5.47593808499534494600e-4,
                                        1.05075007164441684324e-9};
  constexpr std::array<double, 8> kE = {6.65790464350110377720,    5.46378491116411436990,
                                        1.78482653991729133580,    2.96560571828504891230e-1,
                                        2.65321895265761230930e-2, 1.24266094738807843860e-3,
                                        2.71155556874348757815e-5, 2.01033439929228813265e-7};
  constexpr std::array<double, 8> kF = {1.0,
                                        5.99832206555887937690e-1,
                                        1.36929880922735805310e-1,
                                        1.48753612908506148525e-2,
                                        7.86869131145613259100e-4,
                                        1.84631831751005468180e-5,
                                        1.42151175831644588870e-7,
                                        2.04426310338993978564e-15};
  const double q = p - 0.5;
  if (std::fabs(q) <= 0.425) {
    const double r = 0.180625 - q * q;
    return q * polynomial(kA, r) / polynomial(kB, r);
  }
  const double r = std::sqrt(-logarithm(q < 0 ? p : 1 - p));
  const double z = r <= 5 ? polynomial(kC, r - 1.6) / polynomial(kD, r - 1.6)
                          : polynomial(kE, r - 5) / polynomial(kF, r - 5);
  return q < 0 ? -z : z;
}

double lower_normal_tail(double z) {
  double low = 0, high = 0.5;
  for (double p = high / 2; low < p && p < high; p = low + (high - low) / 2) {
    (normal_quantile(p) < z ? low : high) = p;
  }
  return high;
}

BoundedNormal::BoundedNormal(double lowest, double highest) : mirrored_(lowest + highest > 0) {
  constexpr double kFarthest = 37;  // farther out, probabilities underflow a double
  lowest_ = mirrored_ ? -highest : lowest;
  highest_ = mirrored_ ? -lowest : highest;
  if (!(lowest_ <= highest_) || highest_ < -kFarthest) {
    throw std::invalid_argument(
        "bounded_normal needs minimum <= maximum, not both farther than 37 standard "
        "deviations from the mean on one side");
  }
  from_ = lower_normal_tail(std::max(lowest_, -kFarthest));
  to_ = highest_ <= 0 ? lower_normal_tail(highest_) : 1 - lower_normal_tail(std::max(-highest_, -kFarthest));
}

double BoundedNormal::operator()(double uniform) const {
  const double z = normal_quantile(from_ + uniform * (to_ - from_));
  const double bounded = std::min(std::max(z, lowest_), highest_);
  return mirrored_ ? -bounded : bounded;
}

}  // namespace rec_sdk
