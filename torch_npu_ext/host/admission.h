// Which ids of a batch get rows. All lookups of a batch decide together: those of an id without a row are
// counted before any of them is answered.
#pragma once

#include <cstdint>
#include <vector>

#include "torch_npu_ext/host/batch.h"
#include "torch_npu_ext/host/plan_buffers.h"
#include "torch_npu_ext/host/table.h"

namespace rec_sdk {

// `places` are lookups, counted from the first of the batch, in order, whose ids may be unknown to the table.
// Throws MemoryLimitError and std::bad_alloc; what it did is in the log.
void count_candidates(Table* table, const Batch& batch, const Batch::Piece& piece,
                      const std::vector<int64_t>& places, LifeLog* log);

// Whether an id that the table does not know gets a row. If so it is no candidate any more, and the log has
// what was counted of it, for the row that comes next.
bool admit(Table* table, int64_t id, LifeLog* log);

// Candidates are as before the batch.
void undo_candidates(Table* table, const LifeLog& log) noexcept;

}  // namespace rec_sdk
