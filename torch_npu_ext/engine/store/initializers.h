// Initial records. A weight depends on (seed, table name, id, column) alone: not on the order in which ids
// arrive, the cache, the world size or the machine.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "op_kernels/common/record.h"

namespace rec_sdk {

// The 16-bit patterns nearest to a float, ties to even.
uint16_t to_float16(float value);
uint16_t to_bfloat16(float value);

// The standard normal quantile for p in [0.02275, 0.97725], absolute error below 1e-8; no libm.
double central_normal_quantile(double p);

// The standard normal quantile for p in (0, 1), absolute error below 1e-8; of libm, sqrt alone, which is
// exact.
double normal_quantile(double p);

// The p whose normal_quantile is z, for z in [-37, 0].
double lower_normal_tail(double z);

// A standard normal between two bounds, from a uniform number: the half with more of it is the lower one,
// where probabilities keep all their digits.
class BoundedNormal {
 public:
  BoundedNormal() = default;
  BoundedNormal(double lowest, double highest);  // throws std::invalid_argument if next to nothing is between

  double operator()(double uniform) const;  // uniform in [0, 1)

 private:
  double lowest_ = 0, highest_ = 0, from_ = 0.5, to_ = 0.5;
  bool mirrored_ = false;
};

struct Initializer {
  enum class Kind { kLinear, kTruncatedNormal, kBoundedNormal, kUniform };

  // kind: "linear" (minimum + i / (D - 1) * (maximum - minimum)), "uniform" ([minimum, maximum), in fp32),
  // "truncated_normal" (mean, stddev; cut at two sigma) or "bounded_normal" (the same, cut at minimum and
  // maximum, as if drawn again until it is in between). Throws std::invalid_argument.
  Initializer(const std::string& kind, double minimum, double maximum, double mean, double stddev);

  Kind kind;
  double minimum, maximum, mean, stddev;
  BoundedNormal normal;  // of kBoundedNormal
};

// Writes the initial records of one table.
class RecordInitializer {
 public:
  RecordInitializer(
      const RecordLayout& layout, const Initializer& initializer, uint64_t seed, const std::string& table,
      const std::vector<float>& state_init,
      std::optional<DType> stored = {});  // weights are rounded to this type before the layout's

  void write(int64_t id, char* record) const;  // layout.bytes bytes; padding is zero

 private:
  void store(char* record, int64_t column, float value) const;
  float value(uint32_t random) const;

  RecordLayout layout_;
  DType stored_;
  Initializer initializer_;
  std::array<uint32_t, 2> key_;
  std::vector<char> template_;  // states, padding and, for linear, the weight: the same for every id
};

}  // namespace rec_sdk
