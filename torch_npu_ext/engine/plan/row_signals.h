// The signals of each unique row of a batch: the sums of the shows and clicks of its lookups, and its last
// timestamp.
#pragma once

#include <cstdint>
#include <vector>

#include "torch_npu_ext/engine/batch/batch.h"
#include "torch_npu_ext/engine/batch/plan_buffers.h"
#include "torch_npu_ext/engine/group/group.h"
#include "torch_npu_ext/engine/lifecycle/column_updates.h"
#include "torch_npu_ext/engine/plan/scan.h"

namespace rec_sdk {

// Lists the runs of unique rows of all tables that have columns.
void list_runs(const Group& group, const Scan& scan, const PlanBuffers& plan, std::vector<RowRun>* runs);

// Writes the signals of the rows of a share. The entries of the share's default row are meaningless.
void sum_row_signals(const Group& group, const Batch& batch, int64_t share, const Scan& scan,
                     RowSignals* signals) noexcept;

}  // namespace rec_sdk
