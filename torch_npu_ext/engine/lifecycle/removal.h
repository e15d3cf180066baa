// The removal of ids from a table.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "torch_npu_ext/engine/base/span.h"
#include "torch_npu_ext/engine/group/group.h"

namespace rec_sdk {

// Removes ids, and returns the number of ids that the table had; for an index table, the number of ids whose
// rows were cached or stored. Their rows, slots and memory become free. All write-backs must be complete. If
// `candidates`, candidates among the ids are removed too.
//
// If a batch in flight uses one of the rows, or a row has a sum in the accumulation window, throws
// std::runtime_error and removes nothing. Throws std::out_of_range for ids that an index table does not have.
int64_t remove_ids(Group* group, int32_t table, const int64_t* ids, int64_t count, bool candidates = true);

// Shrinks a log of removed ids if a fourth of its memory suffices.
void shrink_removals(std::vector<std::pair<uint64_t, int64_t>>* log) noexcept;

// Throws std::out_of_range if an id is out of range of an index table.
void check_index_ids(const Table& table, Span<int64_t> ids);

}  // namespace rec_sdk
