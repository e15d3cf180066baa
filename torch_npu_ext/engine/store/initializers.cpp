#include "torch_npu_ext/engine/store/initializers.h"

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
  if (kind == "uniform") return Initializer::Kind::kUniform;
  throw std::invalid_argument("initializer kind '" + kind +
                              "' is not known; use 'linear', 'truncated_normal' or 'uniform'");
}

uint64_t mix64(uint64_t x) {  // splitmix64's finaliser
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

uint32_t float_bits(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

void put(DType dtype, float value, char* place) {
  if (dtype == DType::kFloat32) {
    std::memcpy(place, &value, sizeof value);
    return;
  }
  const uint16_t bits = dtype == DType::kFloat16 ? to_float16(value) : to_bfloat16(value);
  std::memcpy(place, &bits, sizeof bits);
}

}  // namespace

uint16_t to_bfloat16(float value) {
  const uint32_t bits = float_bits(value);
  if ((bits & 0x7FFFFFFFu) > 0x7F800000u)
    return static_cast<uint16_t>((bits >> 16) | 0x40u);  // NaN stays NaN
  return static_cast<uint16_t>((bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16);
}

uint16_t to_float16(float value) {
  const uint32_t bits = float_bits(value);
  const uint32_t sign = (bits >> 16) & 0x8000u;
  const uint32_t magnitude = bits & 0x7FFFFFFFu;
  if (magnitude > 0x7F800000u) return static_cast<uint16_t>(sign | 0x7E00u);   // NaN
  if (magnitude >= 0x477FF000u) return static_cast<uint16_t>(sign | 0x7C00u);  // rounds to infinity
  if (magnitude < 0x38800000u) {
    // Below 2^-14: adding 0.5 leaves the subnormal's bits, rounded by the hardware, at the end of the
    // mantissa.
    float shifted;
    std::memcpy(&shifted, &magnitude, sizeof shifted);
    shifted += 0.5f;
    return static_cast<uint16_t>(sign | (float_bits(shifted) - 0x3F000000u));
  }
  const uint32_t rounded = magnitude + 0xFFFu + ((magnitude >> 13) & 1u);
  return static_cast<uint16_t>(sign | ((rounded - 0x38000000u) >> 13));
}

// q * P(q^2) / Q(q^2), q = p - 1/2. The coefficients are a rational least-squares fit of degree 5/5 (Loeb's
// iteration, 400 Chebyshev nodes in q^2) to sqrt(2) * erfinv(2q) / q computed by mpmath with 40 digits; the
// error against scipy.stats.norm.ppf, on 200,001 points of the range, is at most 2e-9.
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

Initializer::Initializer(const std::string& kind_name, double minimum_, double maximum_, double mean_,
                         double stddev_)
    : kind(parse_kind(kind_name)), minimum(minimum_), maximum(maximum_), mean(mean_), stddev(stddev_) {
  if (kind == Kind::kTruncatedNormal) {
    if (!std::isfinite(mean) || !std::isfinite(stddev) || stddev < 0) {
      throw std::invalid_argument("truncated_normal needs a finite mean and a finite stddev >= 0, got mean " +
                                  std::to_string(mean) + ", stddev " + std::to_string(stddev));
    }
  } else if (!std::isfinite(minimum) || !std::isfinite(maximum) || minimum > maximum) {
    throw std::invalid_argument(kind_name + " needs finite minimum <= maximum, got minimum " +
                                std::to_string(minimum) + ", maximum " + std::to_string(maximum));
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
    return rounded >= limit && !empty ? std::nextafter(limit, -HUGE_VALF) : rounded;  // maximum is excluded
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
