// Which timestamps are accepted. One in milliseconds among seconds would make all ids of a table old.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>

#include "torch_npu_ext/engine/batch/batch.h"
#include "torch_npu_ext/engine/batch/plan_buffers.h"
#include "torch_npu_ext/engine/group/group.h"

namespace rec_sdk {

constexpr int64_t kMostAhead = int64_t{10} * 365 * 24 * 60 * 60;  // seconds: ten years

inline int64_t most_ahead_of(int64_t timestamp) {
  constexpr int64_t kMax = std::numeric_limits<int64_t>::max();
  return timestamp > kMax - kMostAhead ? kMax : timestamp + kMostAhead;
}

// The latest that is accepted without a clock, of timestamps that for_each(visit) visits: no more than ten
// years after the earliest of them for which that is at least half of them.
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

// The latest of those up to `most`, or kNever.
template <class ForEach>
int64_t latest_up_to(int64_t most, const ForEach& for_each) {
  int64_t latest = TableClock::kNever;
  for_each([&](int64_t timestamp) {
    if (timestamp <= most) latest = std::max(latest, timestamp);
  });
  return latest;
}

// A batch that is planned moves the clocks of tables that have one: each believes what is at most ten years
// ahead of it. The log says what is not accepted: LifecycleLog::accepted().
void advance_timestamps(Group* group, const Batch& batch, PlanBuffers* plan) noexcept;

}  // namespace rec_sdk
