// The columns of rows that a training batch looks up.
#pragma once

#include "torch_npu_ext/engine/batch/batch.h"
#include "torch_npu_ext/engine/batch/plan_buffers.h"
#include "torch_npu_ext/engine/group/group.h"

namespace rec_sdk {

// Room to undo touch_columns(). Throws std::bad_alloc
void reserve_columns(Group* group, PlanBuffers* plan);
// Updates the rows of a training batch, after its plan was held: its serial is known. Without columns it
// does nothing.
void touch_columns(Group* group, const Batch& batch, PlanBuffers* plan) noexcept;
// The batch was cancelled: all is as before but the version, which errs on the safe side.
void untouch_columns(Group* group, const PlanBuffers& plan) noexcept;

}  // namespace rec_sdk
