// When an id of a hash table gets a row, and when it loses it.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>

namespace rec_sdk {

// score = alpha * shows + beta * clicks, both of the id's whole life. 0 turns a rule off.
struct LifeSpec {
  bool admits = false;   // an id gets a row when its score reaches the threshold
  double threshold = 0;  // lookups of the batch that is planned included
  double alpha = 1, beta = 0;
  double decay = 1;        // of scores that evict: (old + score) * decay in each batch that has the id
  double evict_share = 0;  // of the rows, those with the lowest scores leave
  int64_t evict_age = 0;   // leaves: latest timestamp of the table - its own > this, in seconds
  int64_t evict_idle = 0;  // leaves: no batch of so many, the latest ones, had it
  int64_t max_rows = 0;    // more than so many rows, or candidates, are brought down to 7/8 of it
  // Ids without a row are counted in a sketch of so many bytes (0: each has a counter), whose cells are
  // halved when it counts so many lookups (0: never). It needs alpha > 0 and beta = 0.
  int64_t sketch_bytes = 0, sketch_depth = 4, sketch_halve_after = 0;

  int64_t half_life = 0;   // of scores that evict, in batches, in place of `decay`; 0: none. See half_life.h
  double evict_norm = 0;   // leaves: the 2-norm of its weight < this. The caller measures: Table::small
  double probability = 0;  // or an id is admitted in a batch by chance, without a count: coin.h; 0: by score

  bool evicts_at_intervals() const {
    return evict_share > 0 || evict_age > 0 || evict_idle > 0 || evict_norm > 0;
  }
  bool any() const { return admits || evicts_at_intervals() || max_rows > 0; }
  bool scores() const { return evict_share > 0 || half_life > 0; }  // each row has a score
  bool needs_clicks() const { return beta != 0 && (counts_candidates() || scores()); }
  bool needs_timestamps() const { return evict_age > 0; }
  bool counts_candidates() const { return admits && probability == 0; }
  bool sketches() const { return counts_candidates() && sketch_bytes > 0; }
  // The least count that admits an id, of those that are up to 2^32 - 1. Precondition: alpha > 0.
  uint32_t enough() const {
    constexpr double kMost = std::numeric_limits<uint32_t>::max();
    uint32_t count = static_cast<uint32_t>(std::clamp(std::floor(threshold / alpha), 0.0, kMost));
    while (count > 0 && score(count - 1, 0) >= threshold) --count;
    while (count < std::numeric_limits<uint32_t>::max() && score(count, 0) < threshold) ++count;
    return count;
  }
  double score(uint32_t shows, uint32_t clicks) const { return alpha * shows + beta * clicks; }
  int64_t rows_after_eviction() const { return max_rows - max_rows / 8; }
};

// The rules go by these. Plans that are cancelled are not counted.
struct LifeClock {
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
