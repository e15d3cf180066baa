// The check of timestamps. Without it, a single timestamp in milliseconds among others in seconds would
// advance the clock so far that all ids look old.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>

#include "torch_npu_ext/engine/batch/batch.h"
#include "torch_npu_ext/engine/batch/plan_buffers.h"
#include "torch_npu_ext/engine/group/group.h"

namespace rec_sdk {

constexpr int64_t kMostAhead = int64_t{10} * 365 * 24 * 60 * 60;  // ten years in seconds

inline int64_t most_ahead_of(int64_t timestamp) {
  constexpr int64_t kMax = std::numeric_limits<int64_t>::max();
  return timestamp > kMax - kMostAhead ? kMax : timestamp + kMostAhead;
}

// Returns the latest timestamp that is accepted while the clock of a table has no timestamp. for_each(visit)
// visits the timestamps of the batch. The result is ten years after one of them: the earliest one with which
// at least half of them are accepted.
template <class ForEach>
int64_t most_at_first(const ForEach& for_each) {
  constexpr int64_t kMax = std::numeric_limits<int64_t>::max();
  int64_t earliest = kMax, count = 0;
  for_each([&](int64_t timestamp) {
    earliest = std::min(earliest, timestamp);
    ++count;
  });
  for (;;) {
    const int64_t most = most_ahead_of(earliest);
    int64_t accepted = 0, next = kMax;
    for_each([&](int64_t timestamp) {
      if (timestamp <= most) {
        ++accepted;
      } else {
        next = std::min(next, timestamp);
      }
    });
    if (2 * accepted >= count) return most;
    earliest = next;
  }
}

// Returns the latest visited timestamp that is at most `most`, or kNever if there is none.
template <class ForEach>
int64_t latest_up_to(int64_t most, const ForEach& for_each) {
  int64_t latest = TableClock::kNever;
  for_each([&](int64_t timestamp) {
    if (timestamp <= most) latest = std::max(latest, timestamp);
  });
  return latest;
}

// Advances the clocks of all tables to the latest timestamps of a batch. Timestamps more than ten years ahead
// of a clock are rejected: the plan's log records them, and LifecycleLog::accepted() replaces them by the
// time of the clock.
void advance_timestamps(Group* group, const Batch& batch, PlanBuffers* plan) noexcept;

}  // namespace rec_sdk
