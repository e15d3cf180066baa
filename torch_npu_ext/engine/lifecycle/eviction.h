// Which ids leave a table by its rules.
#pragma once

#include <cstdint>
#include <vector>

#include "torch_npu_ext/engine/group/group.h"

namespace rec_sdk {

// By ascending id.
struct EvictableIds {
  std::vector<int64_t> ids;
  std::vector<uint8_t> reasons;  // EvictReason
  int64_t any_number = 0;        // of those, by rules that may evict every id
};

// Whether the step that ends now is one of every `interval` (0: none is).
inline bool interval_ends(const Table& table, int64_t interval) {
  return interval > 0 && table.spec().rules.evicts_at_intervals() &&
         (table.clock.steps + 1) % static_cast<uint64_t>(interval) == 0;
}

// Takes out the ids that the rules choose, those that go by intervals only if `at_interval`; how many rows.
// Rows that batches in flight use or whose gradients wait for the end of a window stay for the next time. All
// plans must be applied and all rows landed. Throws std::bad_alloc, and then took out none.
int64_t evict_ids(Group* group, int32_t table, bool at_interval);
// The ids with rows that it would take out.
EvictableIds evictable_ids(Group* group, int32_t table, bool at_interval);

}  // namespace rec_sdk
