#include "torch_npu_ext/engine/store/initializers.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <stdexcept>

#include "op_kernels/common/convert.h"
#include "torch_npu_ext/engine/base/philox.h"

namespace rec_sdk {
namespace {

constexpr double kTwoSigmaTail = 0.022750131948179195;  // scipy.stats.norm.cdf(-2)

Initializer::Kind parse_kind(const std::string& kind) {
  if (kind == "linear") return Initializer::Kind::kLinear;
  if (kind == "truncated_normal") return Initializer::Kind::kTruncatedNormal;
  if (kind == "bounded_normal") return Initializer::Kind::kBoundedNormal;
  if (kind == "uniform") return Initializer::Kind::kUniform;
  throw std::invalid_argument(
      "initializer kind '" + kind +
      "' is not known; use 'linear', 'truncated_normal', 'bounded_normal' or 'uniform'");
}

uint64_t mix64(uint64_t x) {  // the finalizer of SplitMix64
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ull;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBull;
  return x ^ (x >> 31);
}

std::array<uint32_t, 2> philox_key(uint64_t seed, const std::string& table) {
  uint64_t name = 0xCBF29CE484222325ull;  // FNV-1a
  for (const char c : table) name = (name ^ static_cast<unsigned char>(c)) * 0x100000001B3ull;
  const uint64_t key = mix64(mix64(seed + 0x9E3779B97F4A7C15ull) ^ name);
  return {static_cast<uint32_t>(key), static_cast<uint32_t>(key >> 32)};
}

// Returns the natural logarithm without libm, whose results differ between machines: the exponent times ln 2,
// plus the mantissa's logarithm as the series of 2 artanh, which converges quickly.
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

uint32_t float_bits(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

void put(DType dtype, float value, char* target) {
  if (dtype == DType::kFloat32) {
    std::memcpy(target, &value, sizeof value);
    return;
  }
  const uint16_t bits = dtype == DType::kFloat16 ? to_float16(value) : to_bfloat16(value);
  std::memcpy(target, &bits, sizeof bits);
}

}  // namespace

uint16_t to_bfloat16(float value) {
  const uint32_t bits = float_bits(value);
  if ((bits & 0x7FFFFFFFu) > 0x7F800000u)
    return static_cast<uint16_t>((bits >> 16) | 0x40u);  // keeps a NaN a NaN
  return static_cast<uint16_t>((bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16);
}

uint16_t to_float16(float value) {
  const uint32_t bits = float_bits(value);
  const uint32_t sign = (bits >> 16) & 0x8000u;
  const uint32_t magnitude = bits & 0x7FFFFFFFu;
  if (magnitude > 0x7F800000u) return static_cast<uint16_t>(sign | 0x7E00u);   // NaN
  if (magnitude >= 0x477FF000u) return static_cast<uint16_t>(sign | 0x7C00u);  // rounds to infinity
  if (magnitude < 0x38800000u) {
    // Below 2^-14 the result is subnormal: adding 0.5 makes the hardware round it, and leaves its bits at the
    // end of the mantissa.
    float shifted;
    std::memcpy(&shifted, &magnitude, sizeof shifted);
    shifted += 0.5f;
    return static_cast<uint16_t>(sign | (float_bits(shifted) - 0x3F000000u));
  }
  const uint32_t rounded = magnitude + 0xFFFu + ((magnitude >> 13) & 1u);
  return static_cast<uint16_t>(sign | ((rounded - 0x38000000u) >> 13));
}

// Returns q * P(q^2) / Q(q^2) with q = p - 1/2. The coefficients are a rational least-squares fit of degree
// 5/5 (Loeb's iteration, 400 Chebyshev nodes in q^2) to sqrt(2) * erfinv(2q) / q, computed by mpmath with 40
// digits. The error against scipy.stats.norm.ppf, on 200,001 points of the range, is at most 2e-9.
double central_normal_quantile(double p) {
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

// Implements Wichura's AS 241 (Applied Statistics 37, 1988), routine PPND16.
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
  constexpr double kFarthest = 37;  // beyond it probabilities underflow a double
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

Initializer::Initializer(const std::string& kind_name, double minimum_, double maximum_, double mean_,
                         double stddev_)
    : kind(parse_kind(kind_name)), minimum(minimum_), maximum(maximum_), mean(mean_), stddev(stddev_) {
  if (kind == Kind::kTruncatedNormal || kind == Kind::kBoundedNormal) {
    if (!std::isfinite(mean) || !std::isfinite(stddev) || stddev < 0) {
      throw std::invalid_argument(kind_name + " needs a finite mean and a finite stddev >= 0, got mean " +
                                  std::to_string(mean) + ", stddev " + std::to_string(stddev));
    }
  }
  if (kind != Kind::kTruncatedNormal &&
      (!std::isfinite(minimum) || !std::isfinite(maximum) || minimum > maximum)) {
    throw std::invalid_argument(kind_name + " needs finite minimum <= maximum, got minimum " +
                                std::to_string(minimum) + ", maximum " + std::to_string(maximum));
  }
  if (kind != Kind::kBoundedNormal) return;
  if (stddev > 0) {
    normal = BoundedNormal((minimum - mean) / stddev, (maximum - mean) / stddev);
  } else if (mean < minimum || mean > maximum) {
    throw std::invalid_argument("bounded_normal with stddev 0 needs a mean from minimum to maximum");
  }
}

RecordInitializer::RecordInitializer(const RecordLayout& layout, const Initializer& initializer,
                                     uint64_t seed, const std::string& table,
                                     const std::vector<float>& state_init, std::optional<DType> stored)
    : layout_(layout),
      stored_(stored.value_or(layout.weight_dtype)),
      initializer_(initializer),
      key_(philox_key(seed, table)),
      template_(layout.bytes) {
  for (int64_t s = 0; s < layout.state_count; ++s) {
    const int64_t size = dtype_bytes(layout.state_dtype[s]);
    char initial[sizeof(float)];
    put(layout.state_dtype[s], state_init[s], initial);
    for (int64_t i = 0; i < layout.state_elements[s]; ++i) {
      std::memcpy(&template_[layout.state_offset[s] + size * i], initial, static_cast<size_t>(size));
    }
  }
  if (initializer.kind != Initializer::Kind::kLinear) return;
  const double step = layout.dim > 1 ? 1.0 / static_cast<double>(layout.dim - 1) : 0.0;
  for (int64_t i = 0; i < layout.dim; ++i) {
    const double share = i + 1 == layout.dim && i > 0 ? 1.0 : static_cast<double>(i) * step;
    const double weight = initializer.minimum + share * (initializer.maximum - initializer.minimum);
    store(template_.data(), i, static_cast<float>(weight));
  }
}

void RecordInitializer::write(int64_t id, char* record) const {
  std::memcpy(record, template_.data(), template_.size());
  if (initializer_.kind == Initializer::Kind::kLinear) return;
  const uint64_t bits = static_cast<uint64_t>(id);
  for (int64_t column = 0; column < layout_.dim; column += 4) {
    const std::array<uint32_t, 4> random =
        philox4x32({static_cast<uint32_t>(bits), static_cast<uint32_t>(bits >> 32),
                    static_cast<uint32_t>(column / 4), 0},
                   key_);
    for (int64_t k = 0; k < 4 && column + k < layout_.dim; ++k) store(record, column + k, value(random[k]));
  }
}

float RecordInitializer::value(uint32_t random) const {
  const double uniform = static_cast<double>(random) * 0x1p-32;
  if (initializer_.kind == Initializer::Kind::kUniform) {
    const double weight = initializer_.minimum + uniform * (initializer_.maximum - initializer_.minimum);
    const float rounded = static_cast<float>(weight);
    const float limit = static_cast<float>(initializer_.maximum);
    const bool empty = limit <= static_cast<float>(initializer_.minimum);
    return rounded >= limit && !empty ? std::nextafter(limit, -HUGE_VALF)
                                      : rounded;  // the maximum is excluded
  }
  if (initializer_.kind == Initializer::Kind::kBoundedNormal) {
    const double weight = initializer_.mean + initializer_.stddev * initializer_.normal(uniform);
    return std::min(std::max(static_cast<float>(weight), static_cast<float>(initializer_.minimum)),
                    static_cast<float>(initializer_.maximum));
  }
  const double normal = central_normal_quantile(kTwoSigmaTail + uniform * (1.0 - 2.0 * kTwoSigmaTail));
  const double cut = normal < -2.0 ? -2.0 : normal > 2.0 ? 2.0 : normal;
  return static_cast<float>(initializer_.mean + initializer_.stddev * cut);
}

void RecordInitializer::store(char* record, int64_t column, float value) const {
  using namespace REC_SDK_ISA;
  if (stored_ == DType::kFloat16) value = Float16::load(to_float16(value));
  if (stored_ == DType::kBFloat16) value = BFloat16::load(to_bfloat16(value));
  put(layout_.weight_dtype, value, record + dtype_bytes(layout_.weight_dtype) * column);
}

}  // namespace rec_sdk
