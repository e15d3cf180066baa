// The last pass of planning: the arrays that the lookup and update kernels read.
#pragma once

#include "torch_npu_ext/engine/batch/batch.h"
#include "torch_npu_ext/engine/batch/plan_buffers.h"
#include "torch_npu_ext/engine/group/group.h"
#include "torch_npu_ext/engine/plan/scan.h"

namespace rec_sdk {

// Fills a share's part of slots, unique_slots, segment_offsets and the other arrays of lookups. Requires the
// table's swap_in_slots and the offsets of bags and tables; overwrites its part of scan->unique. Lookups of
// default rows get their slots, and positions behind all segments.
void write_segments(const Group& group, const Batch& batch, int64_t share, Scan* scan,
                    PlanBuffers* plan) noexcept;

// Fills the plan's origins. Requires its slots and swap_in_slots.
void write_origins(Group* group, PlanBuffers* plan) noexcept;

}  // namespace rec_sdk
