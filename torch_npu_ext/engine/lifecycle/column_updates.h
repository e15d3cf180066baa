// Updates the columns of the rows that a training batch looks up: each record is read, backed up and written
// once.
#pragma once

#include <cstdint>
#include <vector>

#include "torch_npu_ext/engine/base/memory.h"
#include "torch_npu_ext/engine/batch/batch.h"
#include "torch_npu_ext/engine/batch/plan_buffers.h"
#include "torch_npu_ext/engine/group/group.h"

namespace rec_sdk {

// Unique rows [begin, end) of a plan, all of one table; their numbers in the scan are [begin + shift, end +
// shift).
struct RowRun {
  int32_t table, begin, end;
  int64_t shift;
};

// Sums of signals over the lookups of each unique row of a batch, indexed by the row's number in the scan. An
// array that the batch does not have, or that no table uses, is not written.
struct RowSignals {
  bool has_shows = false, has_clicks = false, has_timestamps = false;
  HugeArray<uint32_t> shows;      // the sum of shows; without the array, a row's shows are its lookups
  HugeArray<uint32_t> clicks;     // the sum of clicks
  HugeArray<int64_t> timestamps;  // timestamp of the last lookup
  bool any() const { return has_shows || has_clicks || has_timestamps; }
};

class ColumnUpdates {
 public:
  // Allocates the memory for the other calls. The unique rows of the plan are known; `runs` are the runs of
  // tables with columns. Throws std::bad_alloc.
  void reserve(Group* group, const Batch& batch, const std::vector<RowRun>& runs, PlanBuffers* plan);
  // Must be filled before touch(), if signals()->any().
  RowSignals* signals() { return &signals_; }
  // Updates the columns of a training batch's rows, once the plan has a serial. Does nothing for tables
  // without columns.
  void touch(Group* group, PlanBuffers* plan) noexcept;
  // Restores the columns of a cancelled batch, except the version: a version that is too high only makes
  // delta saves larger.
  static void undo(Group* group, const PlanBuffers& plan) noexcept;

 private:
  struct Part : RowRun {  // a run, or a piece of a long one
    int32_t changed = 0;  // number of its entries in changed_, which start at begin
  };
  template <class Columns>
  void touch_rows(const Group& group, Part* part, PlanBuffers* plan, Columns columns) noexcept;
  void touch_admitted(Group* group, int32_t t, const PlanBuffers& plan) noexcept;
  void log_changes(Group* group, const Part& part, const PlanBuffers& plan) noexcept;

  RowSignals signals_;
  std::vector<Part> parts_;
  HugeArray<int32_t> changed_;  // unique rows that the change logs of their tables record
};

}  // namespace rec_sdk
