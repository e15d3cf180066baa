// The columns of rows that a training batch looks up: read, put aside and written once for each row.
#pragma once

#include <cstdint>
#include <vector>

#include "torch_npu_ext/engine/base/memory.h"
#include "torch_npu_ext/engine/batch/batch.h"
#include "torch_npu_ext/engine/batch/plan_buffers.h"
#include "torch_npu_ext/engine/group/group.h"

namespace rec_sdk {

// Unique rows [begin, end) of a plan, all of one table, which have the numbers [begin + shift, end + shift)
// in the scan.
struct RowRun {
  int32_t table, begin, end;
  int64_t shift;
};

// Sums over the lookups of each unique row of a batch, by its number in the scan. An array that the batch
// does not have, or no table asks for, is not written.
struct RowSignals {
  bool has_shows = false, has_clicks = false, has_timestamps = false;
  HugeArray<uint32_t> shows;      // the sum; where there are none, the lookups of the row
  HugeArray<uint32_t> clicks;     // the sum
  HugeArray<int64_t> timestamps;  // of the last lookup
  bool any() const { return has_shows || has_clicks || has_timestamps; }
};

class ColumnUpdates {
 public:
  // Room for the other calls, of a plan whose unique rows are counted: `runs` are those of tables with
  // columns. Throws std::bad_alloc
  void reserve(Group* group, const Batch& batch, const std::vector<RowRun>& runs, PlanBuffers* plan);
  // To be filled before touch(), if it asks for any.
  RowSignals* signals() { return &signals_; }
  // Updates the rows of a training batch, after its plan was held: its serial is known. Without columns it
  // does nothing.
  void touch(Group* group, PlanBuffers* plan) noexcept;
  // The batch was cancelled: all is as before but the version, which errs on the safe side.
  static void undo(Group* group, const PlanBuffers& plan) noexcept;

 private:
  struct Part : RowRun {  // a run, or a part of a long one
    int32_t changed = 0;  // the first so many of its places in changed_
  };
  template <class Columns>
  void touch_rows(const Group& group, Part* part, PlanBuffers* plan, Columns columns) noexcept;
  void touch_admitted(Group* group, int32_t t, const PlanBuffers& plan) noexcept;
  void log_changes(Group* group, const Part& part, const PlanBuffers& plan) noexcept;

  RowSignals signals_;
  std::vector<Part> parts_;
  HugeArray<int32_t> changed_;  // unique rows whose change the table's log wants
};

}  // namespace rec_sdk
