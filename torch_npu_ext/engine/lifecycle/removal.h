// Takes ids out of a table.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "torch_npu_ext/engine/base/span.h"
#include "torch_npu_ext/engine/group/group.h"

namespace rec_sdk {

// How many ids the table knew; of an index table, which knows all, those with more than their initial record.
// Their rows, slots and memory are free for others. The rows that left the cache have to be written back
// before. Throws std::runtime_error, and removes nothing, when batches in flight use some of the rows or have
// evicted them, or when some have gradients of an open accumulation window; throws std::out_of_range for an
// index table.
// Ids that are candidates are not seen any more, unless `candidates` is false.
int64_t remove_ids(Group* group, int32_t table, const int64_t* ids, int64_t count, bool candidates = true);

// Gives memory of a log of removed ids back when a fourth of it would do.
void shrink_removals(std::vector<std::pair<uint64_t, int64_t>>* log) noexcept;

// Throws std::out_of_range unless the ids are rows of an index table.
void check_index_ids(const Table& table, Span<int64_t> ids);

}  // namespace rec_sdk
