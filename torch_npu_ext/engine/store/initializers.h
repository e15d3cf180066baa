// The initialization of records. An initial weight depends only on the seed, the table's name, the id and the
// column. It does not depend on the order of ids, the cache, the world size or the machine.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "op_kernels/common/record.h"
#include "torch_npu_ext/engine/store/initial_weights.h"

namespace rec_sdk {

// These two functions round a float to the nearest 16-bit value, ties to even.
uint16_t to_float16(float value);
uint16_t to_bfloat16(float value);

// The distribution of the initial weights of a table.
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

// Generator of the initial records of one table.
class RecordInitializer {
 public:
  RecordInitializer(
      const RecordLayout& layout, const Initializer& initializer, uint64_t seed, const std::string& table,
      const std::vector<float>& state_init,
      std::optional<DType> stored = {});  // weights are rounded to `stored` first, then to the layout's dtype

  void write(int64_t id, char* record) const;  // writes layout.bytes bytes; padding is zero

 private:
  void store(char* record, int64_t column, float value) const;

  RecordLayout layout_;
  DType stored_;
  Initializer initializer_;
  WeightDistribution distribution_;
  std::array<uint32_t, 2> key_;
  DrawWeights draw_;
  std::vector<char> template_;  // the states, the padding and linear weights, which are the same for every id
};

}  // namespace rec_sdk
