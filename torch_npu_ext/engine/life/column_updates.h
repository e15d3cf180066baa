// The columns of rows that a training batch looks up: read, put aside and written once for each row.
#pragma once

#include <cstdint>
#include <vector>

#include "torch_npu_ext/engine/base/memory.h"
#include "torch_npu_ext/engine/batch/batch.h"
#include "torch_npu_ext/engine/batch/plan_buffers.h"
#include "torch_npu_ext/engine/group/group.h"

namespace rec_sdk {

// Sums over the lookups of each unique row of a batch, by its place in the plan, and behind these one place
// for each share of the scan, which is not read. An array that the batch does not have, or no table asks
// for, is not written.
struct RowFacts {
  bool has_shows = false, has_clicks = false, has_timestamps = false;
  HugeArray<uint32_t> shows;      // the sum; where there are none, the lookups of the row
  HugeArray<uint32_t> clicks;     // the sum
  HugeArray<int64_t> timestamps;  // of the last lookup
  bool any() const { return has_shows || has_clicks || has_timestamps; }
};

class ColumnUpdates {
 public:
  // Room for the other calls, of a plan whose unique rows are counted. Throws std::bad_alloc
  void reserve(Group* group, const Batch& batch, int64_t shares, PlanBuffers* plan);
  // To be filled before touch(), if it asks for any.
  RowFacts* facts() { return &facts_; }
  // Updates the rows of a training batch, after its plan was held: its serial is known. Without columns it
  // does nothing.
  void touch(Group* group, PlanBuffers* plan) noexcept;
  // The batch was cancelled: all is as before but the version, which errs on the safe side.
  static void undo(Group* group, const PlanBuffers& plan) noexcept;

 private:
  struct Part {  // unique rows of a table
    int32_t table, begin, end;
    int32_t changed = 0;  // the first so many of these places in changed_
  };
  template <class Bytes>
  void touch_rows(const Group& group, Part* part, PlanBuffers* plan, Bytes undone_bytes) noexcept;
  void touch_admitted(Group* group, int32_t t, const PlanBuffers& plan) noexcept;
  void log_changes(Group* group, const Part& part, const PlanBuffers& plan) noexcept;

  RowFacts facts_;
  std::vector<Part> parts_;
  HugeArray<int32_t> changed_;  // unique rows whose change the table's log wants
};

}  // namespace rec_sdk
