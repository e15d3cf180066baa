// Counts of a cache under a policy, without a table: the ids of a run, planned batch by batch as Planner
// does.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace rec_sdk {

struct SimulatedCounts {
  int64_t rows = 0;      // distinct rows of each batch, summed
  int64_t new_rows = 0;  // of these, those that no batch had before
  int64_t misses = 0;    // of these, those that were not in the cache, the new ones too
  int64_t rows_out = 0;  // rows that were evicted from the cache
};

// The distinct rows of each batch of one table, which are read once and simulated at many sizes.
class CacheTrace {
 public:
  // ids[starts[b] .. starts[b + 1]) are those of batch b. Throws std::invalid_argument where `starts` does
  // not grow from 0 to `count`, and std::bad_alloc.
  CacheTrace(const int64_t* ids, int64_t count, const int64_t* starts, int64_t batches);

  int64_t batches() const { return static_cast<int64_t>(new_rows_.size()); }
  int64_t distinct() const { return distinct_; }
  int64_t largest() const { return largest_; }  // distinct rows of the largest batch

  // Each batch is trained before the next. ahead: batches that are announced beside the one that is planned,
  // for policies that look ahead. warm: batches at the beginning that are not counted. Throws
  // CacheTooSmallError, and std::invalid_argument where there is no such policy.
  SimulatedCounts simulate(int64_t slots, const std::string& policy, int64_t ahead, int64_t warm) const;

 private:
  std::vector<uint32_t> rows_;   // of all batches, in the order of their first lookups; numbered as they came
  std::vector<int64_t> starts_;  // [batches + 1] in rows_
  std::vector<int64_t> new_rows_;  // [batches]
  int64_t distinct_ = 0, largest_ = 0;
};

}  // namespace rec_sdk
