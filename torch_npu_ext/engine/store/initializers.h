// The initialization of records. A weight depends only on (seed, table name, id, column): not on the order of
// ids, the cache, the world size or the machine.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "op_kernels/common/record.h"

namespace rec_sdk {

// Round a float to the nearest 16-bit value, ties to even.
uint16_t to_float16(float value);
uint16_t to_bfloat16(float value);

// Returns the standard normal quantile for p in [0.02275, 0.97725], with an absolute error below 1e-8,
// without libm.
double central_normal_quantile(double p);

// Returns the standard normal quantile for p in (0, 1), with an absolute error below 1e-8. Of libm it uses
// only sqrt, which is exactly rounded.
double normal_quantile(double p);

// Returns the p whose normal_quantile() is z, for z in [-37, 0].
double lower_normal_tail(double z);

// Maps a uniform number to a standard normal between two bounds. If most of the interval is positive it is
// mirrored, because probabilities of the lower half keep all their digits.
class BoundedNormal {
 public:
  BoundedNormal() = default;
  BoundedNormal(double lowest,
                double highest);  // throws std::invalid_argument if the interval has almost no probability

  double operator()(double uniform) const;  // uniform in [0, 1)

 private:
  double lowest_ = 0, highest_ = 0, from_ = 0.5, to_ = 0.5;
  bool mirrored_ = false;
};

// The distribution of initial weights.
struct Initializer {
  enum class Kind { kLinear, kTruncatedNormal, kBoundedNormal, kUniform };

  // kind: "linear" (minimum + i / (D - 1) * (maximum - minimum)), "uniform" ([minimum, maximum) in fp32),
  // "truncated_normal" (mean and stddev, cut off at two sigma) or "bounded_normal" (mean and stddev,
  // restricted to [minimum, maximum] as if by rejection). Throws std::invalid_argument.
  Initializer(const std::string& kind, double minimum, double maximum, double mean, double stddev);

  Kind kind;
  double minimum, maximum, mean, stddev;
  BoundedNormal normal;  // used by kBoundedNormal
};

// Generates the initial records of one table.
class RecordInitializer {
 public:
  RecordInitializer(
      const RecordLayout& layout, const Initializer& initializer, uint64_t seed, const std::string& table,
      const std::vector<float>& state_init,
      std::optional<DType> stored = {});  // weights are rounded to this dtype first, then to the layout's

  void write(int64_t id, char* record) const;  // writes layout.bytes bytes; padding is zero

 private:
  void store(char* record, int64_t column, float value) const;
  float value(uint32_t random) const;

  RecordLayout layout_;
  DType stored_;
  Initializer initializer_;
  std::array<uint32_t, 2> key_;
  std::vector<char>
      template_;  // the states, the padding and, for linear, the weights, which are the same for every id
};

}  // namespace rec_sdk
