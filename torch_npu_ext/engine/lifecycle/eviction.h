// The eviction of ids by a table's rules.
#pragma once

#include <cstdint>
#include <vector>

#include "torch_npu_ext/engine/group/group.h"

namespace rec_sdk {

// The ids that the rules evict, ascending.
struct EvictableIds {
  std::vector<int64_t> ids;
  std::vector<uint8_t> reasons;  // an EvictReason for each id
  int64_t any_number = 0;        // how many of the ids are chosen by rules that may evict any number of ids
};

// Returns whether an interval of `interval` steps ends with the present step; an `interval` of 0 means never.
inline bool interval_ends(const Table& table, int64_t interval) {
  return interval > 0 && table.spec().rules.evicts_at_intervals() &&
         (table.clock.steps + 1) % static_cast<uint64_t>(interval) == 0;
}

// Evicts the ids that the rules choose, and returns the number of evicted rows. Rules that run at intervals
// are applied only if `at_interval`. Rows of batches in flight and rows with sums in the accumulation window
// are not evicted. All plans must be applied and all write-backs complete. Throws std::bad_alloc, and then
// evicts nothing.
int64_t evict_ids(Group* group, int32_t table, bool at_interval);
// Returns the ids with a row that evict_ids() would evict.
EvictableIds evictable_ids(Group* group, int32_t table, bool at_interval);

}  // namespace rec_sdk
