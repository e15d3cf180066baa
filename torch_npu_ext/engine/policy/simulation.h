// A simulation of a cache and its policy without a table. It plans recorded ids batch by batch, as Planner
// does, and counts hits and misses.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace rec_sdk {

// The counters of a simulation.
struct SimulatedCounts {
  int64_t rows = 0;      // sum of the distinct rows of all batches
  int64_t new_rows = 0;  // rows that were in no earlier batch
  int64_t misses = 0;    // rows that were not cached, including new rows
  int64_t rows_out = 0;  // rows evicted from the cache
};

// The distinct rows of each recorded batch of one table. They are computed once, and can be simulated with
// many cache sizes.
class CacheTrace {
 public:
  // Batch b has the ids from index starts[b] up to starts[b + 1]. Throws std::invalid_argument unless
  // `starts` ascend from 0 to `count`, and std::bad_alloc.
  CacheTrace(const int64_t* ids, int64_t count, const int64_t* starts, int64_t batches);

  int64_t batches() const { return static_cast<int64_t>(new_rows_.size()); }
  int64_t distinct() const { return distinct_; }
  int64_t largest() const { return largest_; }  // number of distinct rows of the largest batch

  // Simulates training on the batches, one after another. `ahead` is the number of batches that are announced
  // ahead of the planned one, for policies that look ahead. `warm` is the number of batches at the beginning
  // that are not counted. Throws CacheTooSmallError, and std::invalid_argument for an unknown policy.
  SimulatedCounts simulate(int64_t slots, const std::string& policy, int64_t ahead, int64_t warm) const;

 private:
  std::vector<uint32_t>
      rows_;  // rows of all batches, in the order of first lookups; ids are numbered in that order
  std::vector<int64_t> starts_;    // [batches + 1] positions in rows_
  std::vector<int64_t> new_rows_;  // [batches]
  int64_t distinct_ = 0, largest_ = 0;
};

}  // namespace rec_sdk
