// The planner turns a batch into a swap plan; on any error the group is unchanged.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "torch_npu_ext/engine/batch/batch.h"
#include "torch_npu_ext/engine/batch/plan_buffers.h"
#include "torch_npu_ext/engine/group/group.h"
#include "torch_npu_ext/engine/lifecycle/column_updates.h"
#include "torch_npu_ext/engine/plan/scan.h"

namespace rec_sdk {

// Lists the ids out of range of index tables, one entry per table that has some. Throws std::out_of_range for
// tables with kFatal.
void find_bounds_errors(const Group& group, const Batch& batch, std::vector<BoundsError>* errors);

// Plans batches of one group. Its members are reused from batch to batch.
class Planner {
 public:
  // Registers the rows of a batch as future uses until group->future.forget(); returns a ticket.
  uint64_t announce(const BatchInput& input, Group* group);
  // Fills `plan`, whose slots are pinned until group->uses.release(). Its arrays are in `arena`, or in memory
  // of its own if that is null. `announced` is the batch's ticket or 0. After an exception the group is
  // unchanged.
  void plan(const BatchInput& input, Group* group, const std::shared_ptr<PlanBuffers>& plan,
            ExternalArena arena, uint64_t announced = 0);
  // Returns an upper bound of the arena bytes that the batch's plan needs.
  size_t arena_bytes(const BatchInput& input, const Group& group);
  // Undoes the group's latest plan, which must not be started. Only the order of future evictions may differ
  // from before.
  static void cancel(PlanBuffers* plan, Group* group) noexcept;
  // Completes a plan that was applied.
  static void finish(const PlanBuffers& plan, Group* group) noexcept;

 private:
  // Steps that may throw; they run for all tables, in this order, before anything is committed.
  void check_slots(Group* group, int32_t table);
  void reserve(const BatchInput& input, Group* group, PlanBuffers* plan, ExternalArena arena);

  PlanShape shape(const Group& group) const;
  int64_t evictions(const Table& table, int32_t t) const;

  // Steps that cannot fail.
  void commit(Group* group, PlanBuffers* plan) noexcept;
  void swap_table(Group* group, int32_t table, PlanBuffers* plan) noexcept;
  static void swap_out(Group* group, int32_t table, PlanBuffers* plan) noexcept;
  void swap_in(Group* group, int32_t table, PlanBuffers* plan) noexcept;
  static void touch(Group* group, int32_t table, const PlanBuffers& plan) noexcept;
  static void remove_rows(Group* group, int32_t table, const int32_t* slots, const uint32_t* rows,
                          const int64_t* ids, int32_t begin, int32_t end) noexcept;
  static void insert_rows(Group* group, int32_t table, const int32_t* slots, const uint32_t* rows,
                          const int64_t* ids, int32_t begin, int32_t end) noexcept;
  static void cancel_table(PlanBuffers* plan, Group* group, int32_t table) noexcept;
  static void count_new(const Group& group, PlanBuffers* plan) noexcept;
  static void count(Group* group, const PlanBuffers& plan, int64_t sign) noexcept;

  Batch batch_;
  Scan scan_;
  ColumnUpdates column_updates_;
  std::vector<RowRun> runs_;  // of the plan that is being made
};

}  // namespace rec_sdk
