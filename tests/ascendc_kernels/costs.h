// The number of bytes that kernels moved, computed from the counters of the emulated cores.
#pragma once

#include <cstdlib>

#include "emulator/ascendc/engine/counters.h"
#include "tests/ascendc_kernels/support.h"

namespace ascendc_tests {

constexpr int64_t kAllCores = 48;
constexpr double kMostBytes = 1.15;      // relative to the minimum
constexpr double kMostImbalance = 1.10;  // bytes of the busiest core, relative to the mean of all cores

// Returns the values of a kernel's counter, one for each core, from the counters as JSON.
inline std::vector<int64_t> counter(const std::string& json, const std::string& kernel,
                                    const std::string& name) {
  size_t at = json.find("\"" + kernel + "\"");
  if (at == std::string::npos) return {};
  at = json.find("\"" + name + "\"", at);
  std::vector<int64_t> values;
  for (at = json.find('[', at); json[at] != ']';) {
    char* end;
    values.push_back(std::strtoll(json.c_str() + at + 1, &end, 10));
    at = static_cast<size_t>(end - json.c_str());
  }
  return values;
}

struct Moved {
  int64_t bytes = 0;  // counts a whole cache line for each read by the scalar unit
  int64_t of_busiest_core = 0;

  // Returns the bytes of the busiest core, relative to the mean of all cores.
  double imbalance() const {
    return bytes == 0 ? 0 : static_cast<double>(of_busiest_core * kAllCores) / static_cast<double>(bytes);
  }
};

inline Moved moved_by(const std::string& json, const std::string& kernel) {
  constexpr int64_t kLine = 64;
  const std::vector<int64_t> in = counter(json, kernel, "mte2_gm_bytes"),
                             out = counter(json, kernel, "mte3_gm_bytes"),
                             reads = counter(json, kernel, "scalar_gm_reads");
  Moved moved;
  for (size_t core = 0; core < in.size(); ++core) {
    const int64_t bytes = in[core] + out[core] + reads[core] * kLine;
    moved.bytes += bytes;
    moved.of_busiest_core = std::max(moved.of_busiest_core, bytes);
  }
  return moved;
}

}  // namespace ascendc_tests
