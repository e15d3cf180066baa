#include "torch_npu_ext/engine/store/initializers.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <stdexcept>

#include "op_kernels/common/convert.h"

namespace rec_sdk {
namespace {

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

uint32_t float_bits(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

WeightDistribution distribution_of(const Initializer& initializer) {
  WeightDistribution d;
  if (initializer.kind == Initializer::Kind::kUniform) {
    d.offset = initializer.minimum;
    d.scale = initializer.maximum - initializer.minimum;
    const float maximum = static_cast<float>(initializer.maximum);
    if (maximum <= static_cast<float>(initializer.minimum)) return d;  // all weights are the minimum
    d.limit = maximum;                                                 // the maximum itself is excluded
    d.below = std::nextafter(maximum, -HUGE_VALF);
    return d;
  }
  d.offset = initializer.mean;
  d.scale = initializer.stddev;
  d.kind = WeightDistribution::Kind::kTruncatedNormal;
  if (initializer.kind != Initializer::Kind::kBoundedNormal) return d;
  d.kind = WeightDistribution::Kind::kBoundedNormal;
  d.below = static_cast<float>(initializer.minimum);
  d.limit = static_cast<float>(initializer.maximum);
  d.normal = initializer.normal;
  return d;
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
    return static_cast<uint16_t>((bits >> 16) | 0x40u);  // sets a bit so that a NaN stays a NaN
  return static_cast<uint16_t>((bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16);
}

uint16_t to_float16(float value) {
  const uint32_t bits = float_bits(value);
  const uint32_t sign = (bits >> 16) & 0x8000u;
  const uint32_t magnitude = bits & 0x7FFFFFFFu;
  if (magnitude > 0x7F800000u) return static_cast<uint16_t>(sign | 0x7E00u);   // NaN
  if (magnitude >= 0x477FF000u) return static_cast<uint16_t>(sign | 0x7C00u);  // rounds to infinity
  if (magnitude < 0x38800000u) {
    // A number below 2^-14 becomes subnormal. Adding 0.5 rounds it in hardware and leaves the bits of the
    // result at the end of the mantissa.
    float shifted;
    std::memcpy(&shifted, &magnitude, sizeof shifted);
    shifted += 0.5f;
    return static_cast<uint16_t>(sign | (float_bits(shifted) - 0x3F000000u));
  }
  const uint32_t rounded = magnitude + 0xFFFu + ((magnitude >> 13) & 1u);
  return static_cast<uint16_t>(sign | ((rounded - 0x38000000u) >> 13));
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
      distribution_(distribution_of(initializer)),
      key_(philox_key(seed, table)),
      draw_(weight_drawers().back()),
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
  const int64_t drawn = initializer_.kind == Initializer::Kind::kLinear ? 0 : layout_.dim;
  const int64_t from = drawn * dtype_bytes(layout_.weight_dtype);
  std::memcpy(record + from, template_.data() + from, template_.size() - static_cast<size_t>(from));
  for (int64_t begin = 0; begin < drawn; begin += kDrawnColumns) {
    float weights[kDrawnColumns];
    const int64_t count = std::min(kDrawnColumns, drawn - begin);
    draw_(distribution_, key_, id, begin, count, weights);
    if (stored_ == DType::kFloat32 && layout_.weight_dtype == DType::kFloat32) {
      std::memcpy(record + begin * static_cast<int64_t>(sizeof(float)), weights,
                  static_cast<size_t>(count) * sizeof(float));
    } else {
      for (int64_t i = 0; i < count; ++i) store(record, begin + i, weights[i]);
    }
  }
}

void RecordInitializer::store(char* record, int64_t column, float value) const {
  using namespace REC_SDK_ISA;
  if (stored_ == DType::kFloat16) value = Float16::load(to_float16(value));
  if (stored_ == DType::kBFloat16) value = BFloat16::load(to_bfloat16(value));
  put(layout_.weight_dtype, value, record + dtype_bytes(layout_.weight_dtype) * column);
}

}  // namespace rec_sdk
