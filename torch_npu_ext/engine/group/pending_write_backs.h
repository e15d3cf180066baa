// Rows on their way from the cache to the host store: a row is in transit from the plan that evicts it until
// its record has landed. A caller that wants such a row learns here which plan's copy to wait for, and waits
// for no other.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "torch_npu_ext/engine/batch/plan_buffers.h"
#include "torch_npu_ext/engine/group/row_set.h"

namespace rec_sdk {

// Called under the engine's mutex, but for find(), which waits for no plan in the making.
class PendingWriteBacks {
 public:
  bool empty() const { return write_backs_.empty(); }

  // All that can fail of the calls below, for a plan to come.
  void prepare(bool looks_up);
  void add(const std::shared_ptr<PlanBuffers>& plan) noexcept;
  // The rows have landed, or the plan was cancelled.
  void remove(const PlanBuffers& plan) noexcept;
  std::shared_ptr<PlanBuffers> find(uint64_t serial) const noexcept;

  // The newest write_back that has the row, or 0. Needs prepare(true).
  uint64_t serial_of(int32_t table, uint32_t row) const noexcept;
  // plan->sources and plan->late: of the rows in. Needs prepare(true), and room in sources for each
  // write_back and in late for each row.
  void find_sources(PlanBuffers* plan) const noexcept;
  // Places [i] among the plan's rows in, ascending, of those that its sources have not landed yet.
  std::vector<int32_t> late_rows(const PlanBuffers& plan) const;
  template <class Visit>  // visit(plan) of every write_back
  void for_each(Visit visit) const {
    for (const WriteBack& write_back : write_backs_) visit(*write_back.plan);
  }
  size_t size() const { return write_backs_.size(); }

 private:
  struct WriteBack {
    std::shared_ptr<PlanBuffers> plan;
    RowSet rows;  // from the first question on
    bool indexed = false;
  };
  void index(WriteBack* write_back);

  mutable std::mutex mutex_;            // of changes of write_backs_, and of find()
  std::vector<WriteBack> write_backs_;  // oldest first
  std::vector<RowSet> spare_;           // of departures that are over: a plan asks the system for no memory
};

void add_source(std::vector<uint64_t>* sources, uint64_t serial);  // once each

}  // namespace rec_sdk
