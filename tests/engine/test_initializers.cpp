// Initializers: Philox compared with the known answers of Random123, and the bounds, distribution and
// rounding of initial weights.
#include <array>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <set>
#include <stdexcept>
#include <string>
#include <vector>

#include "tests/engine/check.h"
#include "torch_npu_ext/engine/base/philox.h"
#include "torch_npu_ext/engine/store/initializers.h"

using rec_sdk::DType;
using rec_sdk::Initializer;
using rec_sdk::RecordInitializer;
using rec_sdk::RecordLayout;

namespace {

using Block = std::array<uint32_t, 4>;

TEST(philox_known_answers) {  // the answers are from kat_vectors of Random123 1.14
  CHECK(rec_sdk::philox4x32({0, 0, 0, 0}, {0, 0}) == (Block{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}));
  const uint32_t ones = 0xffffffff;
  CHECK(rec_sdk::philox4x32({ones, ones, ones, ones}, {ones, ones}) ==
        (Block{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}));
  CHECK(rec_sdk::philox4x32({0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}, {0xa4093822, 0x299f31d0}) ==
        (Block{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}));
}

RecordLayout layout_of(int64_t dim, DType dtype) {
  const int64_t states[] = {dim, 1};
  return rec_sdk::make_record_layout(dim, dtype, states, 2);
}

std::vector<float> weights(const Initializer& initializer, int64_t dim, int64_t ids, uint64_t seed = 1,
                           const std::string& table = "t") {
  const RecordLayout layout = layout_of(dim, DType::kFloat32);
  const RecordInitializer init(layout, initializer, seed, table, {0.5f, 0.25f});
  std::vector<float> all(static_cast<size_t>(ids * dim));
  std::vector<char> record(static_cast<size_t>(layout.bytes), 0x55);
  for (int64_t id = 0; id < ids; ++id) {
    init.write(id - ids / 2, record.data());
    std::memcpy(&all[id * dim], record.data(), static_cast<size_t>(dim) * sizeof(float));
    float state;
    std::memcpy(&state, &record[layout.state_offset[0] + 4 * (dim - 1)], sizeof state);
    CHECK(state == 0.5f);
    std::memcpy(&state, &record[layout.state_offset[1]], sizeof state);
    CHECK(state == 0.25f);
    for (int64_t i = layout.state_offset[1] + 4; i < layout.bytes; ++i) CHECK(record[i] == 0);
  }
  return all;
}

TEST(linear) {
  const std::vector<float> w = weights(Initializer("linear", -1.0, 3.0, 0, 1), 5, 3);
  for (int64_t i = 0; i < 15; ++i) CHECK(w[i] == static_cast<float>(-1.0 + static_cast<double>(i % 5)));
  CHECK(weights(Initializer("linear", -2.0, 3.0, 0, 1), 1, 1)[0] == -2.0f);
  CHECK(weights(Initializer("linear", -0.1, 0.7, 0, 1), 7, 1)[6] == 0.7f);
}

struct Moments {
  double mean, variance, low, high;
};
Moments moments(const std::vector<float>& values) {
  Moments m{0, 0, values[0], values[0]};
  for (const float v : values) {
    m.mean += v;
    m.low = std::fmin(m.low, v);
    m.high = std::fmax(m.high, v);
  }
  m.mean /= static_cast<double>(values.size());
  for (const float v : values) m.variance += (v - m.mean) * (v - m.mean);
  m.variance /= static_cast<double>(values.size());
  return m;
}

TEST(uniform) {
  const Moments m = moments(weights(Initializer("uniform", -2.0, 6.0, 0, 1), 6, 50000));
  CHECK(m.low >= -2.0 && m.low < -1.999 && m.high < 6.0 && m.high > 5.999);
  CHECK(std::fabs(m.mean - 2.0) < 0.02 && std::fabs(m.variance - 64.0 / 12) < 0.03);
  // The range is between two neighbouring floats, and rounding must not give the excluded end.
  const float high = std::nextafter(1.0f, 2.0f);
  for (const float v : weights(Initializer("uniform", 1.0, high, 0, 1), 8, 100)) CHECK(v == 1.0f);
  for (const float v : weights(Initializer("uniform", 0.5, 0.5, 0, 1), 8, 4)) CHECK(v == 0.5f);
}

TEST(truncated_normal) {
  const Moments m = moments(weights(Initializer("truncated_normal", 0, 0, 1.0, 0.5), 8, 50000));
  CHECK(m.low >= 0.0 && m.low < 0.001 && m.high <= 2.0 && m.high > 1.999);
  // The variance of the standard normal distribution, cut off at two sigma, is 1 - 4 phi(2) / (Phi(2) -
  // Phi(-2)) = 0.7737413.
  CHECK(std::fabs(m.mean - 1.0) < 0.003 && std::fabs(m.variance - 0.25 * 0.7737413) < 0.002);
}

TEST(quantile) {
  for (int i = 0; i <= 100000; ++i) {
    const double p = 0.02275014 + (0.97724986 - 0.02275014) * i / 100000;
    const double x = rec_sdk::central_normal_quantile(p);
    CHECK(std::fabs(0.5 * std::erfc(-x / std::sqrt(2.0)) - p) < 5e-10);  // the slope at two sigma is 0.054
  }
}

double density(double z) { return std::exp(-z * z / 2) / std::sqrt(2 * std::acos(-1.0)); }

double upper_tail(double z) { return std::erfc(z / std::sqrt(2.0)) / 2; }

TEST(quantile_of_every_probability) {
  for (double z = -37; z <= 0; z += 0.125) {
    const double tail = upper_tail(-z);
    CHECK(std::fabs(rec_sdk::normal_quantile(tail) - z) < 1e-9);
    CHECK(std::fabs(rec_sdk::lower_normal_tail(z) / tail - 1) < 1e-9);
    if (z > -5) CHECK(std::fabs(rec_sdk::normal_quantile(1 - tail) + z) < 1e-8);
  }
}

// Mean and variance of a standard normal distribution that is truncated at two bounds, which are on the same
// or on different sides of the mean.
TEST(bounded_normal) {
  constexpr double kBounds[][2] = {{-1, 3}, {0, 20}, {-30, 0}, {2, 2.5}, {-6, -5}, {-0.1, 0.2}};
  for (const auto& [low, high] : kBounds) {
    const Moments m =
        moments(weights(Initializer("bounded_normal", 3 + low / 2, 3 + high / 2, 3, 0.5), 8, 50000));
    const double share = low > 0 ? upper_tail(low) - upper_tail(high) : upper_tail(-high) - upper_tail(-low);
    const double mean = (density(low) - density(high)) / share;
    const double variance = 1 + (low * density(low) - high * density(high)) / share - mean * mean;
    CHECK(m.low >= static_cast<float>(3 + low / 2) && m.high <= static_cast<float>(3 + high / 2));
    CHECK(std::fabs((m.mean - 3) / 0.5 - mean) < 0.005);
    CHECK(std::fabs(m.variance / 0.25 / variance - 1) < 0.02);
  }
  for (const float v : weights(Initializer("bounded_normal", 0, 1, 0.25, 0), 8, 4)) CHECK(v == 0.25f);
  for (const float v : weights(Initializer("bounded_normal", 1, 1, 0.25, 1), 8, 4)) CHECK(v == 1.0f);
}

// For blocks of all sizes, every variant draws the same weights as philox4x32 with the conversion of single
// numbers.
TEST(same_weights_on_every_processor) {
  using rec_sdk::WeightDistribution;
  const std::array<uint32_t, 2> key = {0x12345678, 0x9abcdef0};
  const int64_t id = -(int64_t{7} << 40) + 3;
  for (const WeightDistribution::Kind kind :
       {WeightDistribution::Kind::kUniform, WeightDistribution::Kind::kTruncatedNormal,
        WeightDistribution::Kind::kBoundedNormal}) {
    WeightDistribution d{kind, -0.5, 1.25, 0.5f, 0.25f, {}};
    if (kind == WeightDistribution::Kind::kBoundedNormal) d.below = -0.25f;
    for (const int64_t count : {1, 3, 16, 17, 32, 33, 64}) {
      std::vector<float> expected, drawn(static_cast<size_t>(count) + 1, 7.0f);
      for (int64_t column = 0; column < count; ++column) {
        const auto block =
            rec_sdk::philox4x32({3, 0xfffff900, static_cast<uint32_t>(column / 4 + 5), 0}, key);
        const double uniform = block[column % 4] * 0x1p-32, tail = 0.022750131948179195;
        const double normal = rec_sdk::central_normal_quantile(tail + uniform * (1.0 - 2.0 * tail));
        const double x = kind == WeightDistribution::Kind::kUniform ? uniform
                         : kind == WeightDistribution::Kind::kBoundedNormal
                             ? d.normal(uniform)
                             : std::fmin(std::fmax(normal, -2.0), 2.0);
        const float weight = static_cast<float>(-0.5 + 1.25 * x);
        expected.push_back(kind == WeightDistribution::Kind::kTruncatedNormal ? weight
                           : kind == WeightDistribution::Kind::kBoundedNormal
                               ? std::fmin(std::fmax(weight, -0.25f), 0.5f)
                           : weight >= 0.5f ? 0.25f
                                            : weight);
      }
      expected.push_back(7.0f);  // no variant writes behind the last weight
      for (const rec_sdk::DrawWeights draw : rec_sdk::weight_drawers()) {
        draw(d, key, id, 20, count, drawn.data());
        CHECK(std::memcmp(drawn.data(), expected.data(), expected.size() * sizeof(float)) == 0);
      }
    }
  }
}

// A weight depends on its column and not on the number of columns, which are drawn in blocks.
TEST(blocks_of_columns) {
  const Initializer init("uniform", 0.0, 1.0, 0, 1);
  const std::vector<float> wide = weights(init, 200, 1);
  CHECK(std::set<float>(wide.begin(), wide.end()).size() > 195);  // no block repeats another
  for (const int64_t dim : {3, 64, 65, 130}) {
    CHECK(weights(init, dim, 1) == std::vector<float>(wide.begin(), wide.begin() + dim));
  }
}

TEST(keys) {
  const Initializer init("uniform", 0.0, 1.0, 0, 1);
  const std::vector<float> base = weights(init, 8, 100);
  CHECK(base == weights(init, 8, 100));
  CHECK(base != weights(init, 8, 100, 2));
  CHECK(base != weights(init, 8, 100, 1, "u"));
  CHECK(std::set<float>(base.begin(), base.end()).size() >
        795);  // no two ids or columns have the same numbers
  // These ids differ only in their high halves.
  const RecordLayout layout = layout_of(4, DType::kFloat32);
  const RecordInitializer direct(layout, init, 1, "t", {0, 0});
  std::vector<char> a(static_cast<size_t>(layout.bytes)), b(a);
  direct.write(7, a.data());
  direct.write(7 + (int64_t{1} << 32), b.data());
  CHECK(a != b);
}

// Rounding compared with brute force: the nearest of all 2^16 values, ties to the even bit pattern.
float value_of(uint16_t bits, DType dtype) {
  if (dtype == DType::kBFloat16) {
    const uint32_t wide = static_cast<uint32_t>(bits) << 16;
    float value;
    std::memcpy(&value, &wide, sizeof value);
    return value;
  }
  const int exponent = bits >> 10 & 31;
  const float mantissa = static_cast<float>(bits & 1023);
  const float magnitude = exponent == 31  ? (mantissa != 0 ? NAN : HUGE_VALF)
                          : exponent == 0 ? std::ldexp(mantissa, -24)
                                          : std::ldexp(1024.0f + mantissa, exponent - 25);
  return (bits & 0x8000) != 0 ? -magnitude : magnitude;
}

void check_rounding(DType dtype) {
  const auto convert = [dtype](float v) {
    return dtype == DType::kFloat16 ? rec_sdk::to_float16(v) : rec_sdk::to_bfloat16(v);
  };
  const uint16_t last = dtype == DType::kFloat16 ? 0x7BFF : 0x7F7F;
  for (uint16_t bits = 0; bits < last; ++bits) {
    const double low = value_of(bits, dtype);
    const double high = value_of(static_cast<uint16_t>(bits + 1), dtype);
    const float middle = static_cast<float>((low + high) / 2);
    CHECK(convert(static_cast<float>(low)) == bits);
    CHECK(convert(-static_cast<float>(low)) == (bits | 0x8000));
    if (static_cast<double>(middle) != (low + high) / 2)
      continue;  // the middle is a subnormal float, and not exact
    CHECK(convert(middle) == (bits % 2 == 0 ? bits : bits + 1));
    CHECK(convert(std::nextafter(middle, HUGE_VALF)) == bits + 1);
    CHECK(convert(std::nextafter(middle, 0.0f)) == bits);
  }
  CHECK(std::isinf(value_of(convert(HUGE_VALF), dtype)));
  CHECK(std::isinf(value_of(convert(std::numeric_limits<float>::max()), dtype)));
  CHECK(std::isnan(value_of(convert(NAN), dtype)));
}

TEST(half_rounding) {
  check_rounding(DType::kFloat16);
  check_rounding(DType::kBFloat16);
}

TEST(rejects) {
  CHECK_THROWS(Initializer("normal", 0, 1, 0, 1), std::invalid_argument);
  CHECK_THROWS(Initializer("uniform", 1, 0, 0, 1), std::invalid_argument);
  CHECK_THROWS(Initializer("linear", 0, HUGE_VAL, 0, 1), std::invalid_argument);
  CHECK_THROWS(Initializer("truncated_normal", 0, 1, 0, -1), std::invalid_argument);
  CHECK_THROWS(Initializer("bounded_normal", 0, 1, 0, -1), std::invalid_argument);
  CHECK_THROWS(Initializer("bounded_normal", 1, 0, 0, 1), std::invalid_argument);
  CHECK_THROWS(Initializer("bounded_normal", 0, HUGE_VAL, 0, 1), std::invalid_argument);
  CHECK_THROWS(Initializer("bounded_normal", 38, 39, 0, 1), std::invalid_argument);
  CHECK_THROWS(Initializer("bounded_normal", 1, 2, 0, 0), std::invalid_argument);
}

}  // namespace
