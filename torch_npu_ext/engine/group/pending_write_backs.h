// The plans with pending write-backs. The write-back of a victim is pending from planning until the victim's
// record is in the host store. This file tells a caller that needs a row which plan's write-back to wait for.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "torch_npu_ext/engine/batch/plan_buffers.h"
#include "torch_npu_ext/engine/group/row_set.h"

namespace rec_sdk {

// The caller must hold the engine's mutex, except for find(), which must not wait for a thread that is
// planning.
class PendingWriteBacks {
 public:
  bool empty() const { return write_backs_.empty(); }

  // Allocates the memory that the calls below need for the next plan, so that they cannot fail. looks_up:
  // whether serial_of() or find_sources() will be called.
  void prepare(bool looks_up);
  void add(const std::shared_ptr<PlanBuffers>& plan) noexcept;
  // Removes a plan whose write-back is complete or that was cancelled.
  void remove(const PlanBuffers& plan) noexcept;
  std::shared_ptr<PlanBuffers> find(uint64_t serial) const noexcept;

  // Returns the serial of the newest plan with a pending write-back of the row, or 0. Precondition:
  // prepare(true).
  uint64_t serial_of(int32_t table, uint32_t row) const noexcept;
  // Fills plan->sources and plan->late for the plan's rows in. Preconditions: prepare(true), and space
  // reserved in `sources` for every pending plan and in `late` for every row in.
  void find_sources(PlanBuffers* plan) const noexcept;
  // Returns the indices, ascending, of those rows in of the plan whose write-back is still pending.
  std::vector<int32_t> late_rows(const PlanBuffers& plan) const;
  template <class Visit>  // calls visit(plan) for every pending plan
  void for_each(Visit visit) const {
    for (const WriteBack& write_back : write_backs_) visit(*write_back.plan);
  }
  size_t size() const { return write_backs_.size(); }

 private:
  struct WriteBack {
    std::shared_ptr<PlanBuffers> plan;
    RowSet rows;  // filled by prepare(true)
    bool indexed = false;
  };
  void index(WriteBack* write_back);

  mutable std::mutex mutex_;            // protects write_backs_ from changes during find()
  std::vector<WriteBack> write_backs_;  // oldest first
  std::vector<RowSet>
      spare_;  // row sets of completed write-backs, which are reused so that planning allocates no memory
};

void add_source(std::vector<uint64_t>* sources, uint64_t serial);  // skips 0 and duplicates

}  // namespace rec_sdk
