// Which ids leave a table by its rules.
#pragma once

#include <cstdint>
#include <vector>

#include "torch_npu_ext/engine/group/group.h"

namespace rec_sdk {

// The rule by which an id leaves; of several that would take it out, the first in this order. Saves have the
// numbers.
enum class LeaveReason : uint8_t { kNone = 0, kAge = 1, kIdle = 2, kNorm = 6, kScore = 3, kBound = 4 };

// By ascending id.
struct LeavingIds {
  std::vector<int64_t> ids;
  std::vector<uint8_t> reasons;  // LeaveReason
};

// Whether the step that ends now is one of every `interval` (0: none is).
inline bool interval_ends(const Table& table, int64_t interval) {
  return interval > 0 && table.spec().life.evicts_at_intervals() &&
         (table.clock.steps + 1) % static_cast<uint64_t>(interval) == 0;
}

// Takes out the ids that the rules choose, by age, idleness, norm and score if `at_interval`, and in any case
// those beyond max_rows; how many rows. Rows that batches in flight use or whose gradients wait for the end
// of a window stay for the next time. All plans must be applied and all rows landed. Throws std::bad_alloc,
// and then took out none.
int64_t evict_ids(Group* group, int32_t table, bool at_interval);
// The ids with rows that it would take out.
LeavingIds evictable_ids(Group* group, int32_t table, bool at_interval);

}  // namespace rec_sdk
