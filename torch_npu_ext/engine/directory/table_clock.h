// The clocks of a table, and counts that end.
#pragma once

#include <cstdint>
#include <limits>

namespace rec_sdk {

// The rules of a table go by these. Plans that are cancelled are not counted.
struct TableClock {
  static constexpr int64_t kNever = std::numeric_limits<int64_t>::min();
  uint64_t batches = 0;        // planned
  uint64_t steps = 0;          // trained
  int64_t timestamp = kNever;  // the latest

  // Batches after the one that had an id last. One that is yet to come is now: the row was put back, or the
  // clock was set back.
  uint32_t batches_since(uint32_t last_use) const {
    const uint32_t found = static_cast<uint32_t>(batches) - last_use;
    return found > uint32_t{1} << 31 ? 0 : found;
  }
};

inline uint32_t saturated_sum(uint32_t a, uint32_t b) {
  const uint32_t sum = a + b;
  return sum | (uint32_t{0} - static_cast<uint32_t>(sum < a));  // no branch
}

}  // namespace rec_sdk
