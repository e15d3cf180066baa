// The last pass of a plan: what the lookup and update kernels read.
#pragma once

#include "torch_npu_ext/host/batch.h"
#include "torch_npu_ext/host/group.h"
#include "torch_npu_ext/host/plan_buffers.h"
#include "torch_npu_ext/host/scan.h"

namespace rec_sdk {

// Fills slots, unique_slots, table_offsets, segment_offsets, positions, grad_row, grad_column and scale.
// Needs swap_in_slots and offsets; uses up scan->unique.
void write_segments(const Group& group, const Batch& batch, Scan* scan, PlanBuffers* plan) noexcept;

}  // namespace rec_sdk
