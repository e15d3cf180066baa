// The clock of a table, and a saturating addition.
#pragma once

#include <cstdint>
#include <limits>

namespace rec_sdk {

// The clock by which the rules of a table measure time. Cancelled plans do not advance it.
struct TableClock {
  static constexpr int64_t kNever = std::numeric_limits<int64_t>::min();
  uint64_t batches = 0;        // number of planned batches
  uint64_t steps = 0;          // number of training steps that have ended
  int64_t timestamp = kNever;  // latest timestamp of all batches

  // Returns the number of batches since batch `last_use`, the last one that used an id. The result is 0 if
  // that batch is later than the clock, which happens if a plan was cancelled or the clock was set back.
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
