// The clock of a table, and a saturating addition.
#pragma once

#include <cstdint>
#include <limits>

namespace rec_sdk {

// The clock that the rules of a table use. Cancelled plans do not count.
struct TableClock {
  static constexpr int64_t kNever = std::numeric_limits<int64_t>::min();
  uint64_t batches = 0;        // batches planned
  uint64_t steps = 0;          // steps trained
  int64_t timestamp = kNever;  // the latest timestamp

  // Returns the number of batches since the batch that used an id last. A batch in the future counts as now:
  // the row was restored by a cancelled plan, or the clock was set back.
  uint32_t batches_since(uint32_t last_use) const {
    const uint32_t elapsed = static_cast<uint32_t>(batches) - last_use;
    return elapsed > uint32_t{1} << 31 ? 0 : elapsed;
  }
};

// Returns a + b, or 2^32 - 1 on overflow.
inline uint32_t saturated_sum(uint32_t a, uint32_t b) {
  const uint32_t sum = a + b;
  return sum | (uint32_t{0} - static_cast<uint32_t>(sum < a));  // without a branch
}

}  // namespace rec_sdk
