// The last pass of planning, which writes the arrays that the lookup and update kernels read.
#pragma once

#include "torch_npu_ext/engine/batch/batch.h"
#include "torch_npu_ext/engine/batch/plan_buffers.h"
#include "torch_npu_ext/engine/group/group.h"
#include "torch_npu_ext/engine/plan/scan.h"

namespace rec_sdk {

// Fills the part of a share in slots, unique_slots, segment_offsets and the other arrays of lookups;
// overwrites its part of scan->unique. Requires the table's swap_in_slots and the offsets of bags and tables.
// Lookups of a default row get its slot, and positions behind all segments.
void write_segments(const Group& group, const Batch& batch, int64_t share, Scan* scan,
                    PlanBuffers* plan) noexcept;

// Fills the plan's array `origins`. Requires its slots and swap_in_slots.
void write_origins(Group* group, PlanBuffers* plan) noexcept;

}  // namespace rec_sdk
