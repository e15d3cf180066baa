// Updates of the columns of the rows that a training batch looks up. The columns of each row are read, backed
// up and written once.
#pragma once

#include <cstdint>
#include <vector>

#include "torch_npu_ext/engine/base/memory.h"
#include "torch_npu_ext/engine/batch/batch.h"
#include "torch_npu_ext/engine/batch/plan_buffers.h"
#include "torch_npu_ext/engine/group/group.h"

namespace rec_sdk {

// A run of unique rows of a table: [begin, end) are their indices in the plan, and [begin + shift, end +
// shift) are their numbers in the scan.
struct RowRun {
  int32_t table, begin, end;
  int64_t shift;
};

// The sums of the signals of all lookups of each unique row of a batch, indexed by the row's number in the
// scan. An array is not written if the batch does not have the signal or no table uses it.
struct RowSignals {
  bool has_shows = false, has_clicks = false, has_timestamps = false;
  HugeArray<uint32_t> shows;      // the sum of the shows; if not written, each lookup is one show
  HugeArray<uint32_t> clicks;     // the sum of the clicks
  HugeArray<int64_t> timestamps;  // timestamp of the last lookup
  bool any() const { return has_shows || has_clicks || has_timestamps; }
};

class ColumnUpdates {
 public:
  // Allocates the memory that the other calls need. `runs` contains the plan's unique rows of tables that
  // keep columns (see Column). Throws std::bad_alloc.
  void reserve(Group* group, const Batch& batch, const std::vector<RowRun>& runs, PlanBuffers* plan);
  // If signals()->any(), the caller must fill the arrays before touch().
  RowSignals* signals() { return &signals_; }
  // Updates the columns of the rows of a training batch. The plan must have its serial number. Does nothing
  // for tables without columns.
  void touch(Group* group, PlanBuffers* plan) noexcept;
  // Restores the columns of the rows of a cancelled batch, except their versions: a version that is too high
  // only makes delta saves larger.
  static void undo(Group* group, const PlanBuffers& plan) noexcept;

 private:
  struct Part : RowRun {  // a run, or a piece of a long one
    int32_t changed = 0;  // number of its entries in changed_, which start at index `begin`
  };
  template <class Columns>
  void touch_rows(const Group& group, Part* part, PlanBuffers* plan, Columns columns) noexcept;
  void touch_admitted(Group* group, int32_t t, const PlanBuffers& plan) noexcept;
  void log_changes(Group* group, const Part& part, const PlanBuffers& plan) noexcept;

  RowSignals signals_;
  std::vector<Part> parts_;
  HugeArray<int32_t> changed_;  // unique rows that must be added to the change logs of their tables
};

}  // namespace rec_sdk
