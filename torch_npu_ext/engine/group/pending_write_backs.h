// The plans with pending write-backs: a victim's write-back is pending from planning until its record is in
// the host store. A caller that needs such a row finds here which plan's copy it has to wait for, and waits
// for no other.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "torch_npu_ext/engine/batch/plan_buffers.h"
#include "torch_npu_ext/engine/group/row_set.h"

namespace rec_sdk {

// Calls require the engine's mutex, except find(), which must not wait for a plan in the making.
class PendingWriteBacks {
 public:
  bool empty() const { return write_backs_.empty(); }

  // Allocates what the calls below need for the next plan, so that they cannot fail. looks_up: serial_of() or
  // find_sources() will be called.
  void prepare(bool looks_up);
  void add(const std::shared_ptr<PlanBuffers>& plan) noexcept;
  // Removes a plan whose write-back is complete, or that was cancelled.
  void remove(const PlanBuffers& plan) noexcept;
  std::shared_ptr<PlanBuffers> find(uint64_t serial) const noexcept;

  // Returns the serial of the newest plan that writes back the row, or 0. Precondition: prepare(true).
  uint64_t serial_of(int32_t table, uint32_t row) const noexcept;
  // Fills plan->sources and plan->late for the rows in. Preconditions: prepare(true), and reserved space in
  // `sources` for every pending plan and in `late` for every row.
  void find_sources(PlanBuffers* plan) const noexcept;
  // Returns the indices, ascending, of the plan's rows in whose write-back is still pending.
  std::vector<int32_t> late_rows(const PlanBuffers& plan) const;
  template <class Visit>  // calls visit(plan) for every pending plan
  void for_each(Visit visit) const {
    for (const WriteBack& write_back : write_backs_) visit(*write_back.plan);
  }
  size_t size() const { return write_backs_.size(); }

 private:
  struct WriteBack {
    std::shared_ptr<PlanBuffers> plan;
    RowSet rows;  // built at the first lookup
    bool indexed = false;
  };
  void index(WriteBack* write_back);

  mutable std::mutex mutex_;            // guards changes of write_backs_, and find()
  std::vector<WriteBack> write_backs_;  // oldest first
  std::vector<RowSet>
      spare_;  // sets of completed write-backs for reuse, so that planning allocates no memory
};

void add_source(std::vector<uint64_t>* sources, uint64_t serial);  // adds each serial once

}  // namespace rec_sdk
