// The planner, which turns a batch into a swap plan. If planning fails, the group is unchanged.
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

// Lists the index tables with ids out of range: one entry per table, with their number and an example. Throws
// std::out_of_range for a table with kFatal.
void find_bounds_errors(const Group& group, const Batch& batch, std::vector<BoundsError>* errors);

// Planner of the batches of one group. It reuses its buffers from batch to batch.
class Planner {
 public:
  // Registers the rows of a batch as future uses and returns a ticket. group->future.forget() of the ticket
  // ends the registration.
  uint64_t announce(const BatchInput& input, Group* group);
  // Fills `plan`. Its slots are pinned until group->uses.release(). Its arrays are in `arena`, or in newly
  // allocated memory if the arena is null. `announced` is the ticket of the batch's announcement, or 0. After
  // an exception the group is unchanged.
  void plan(const BatchInput& input, Group* group, const std::shared_ptr<PlanBuffers>& plan,
            ExternalArena arena, uint64_t announced = 0);
  // Returns an upper bound of the arena size, in bytes, that the batch's plan needs.
  size_t arena_bytes(const BatchInput& input, const Group& group);
  // Undoes the group's latest plan, which must not be started. The group is then as before the plan, except
  // that later evictions may choose other victims.
  static void cancel(PlanBuffers* plan, Group* group) noexcept;
  // Ends a plan that was applied: updates the accumulation window and the statistics.
  static void finish(const PlanBuffers& plan, Group* group) noexcept;

 private:
  // Planning steps that may throw. They run for all tables, in this order, before commit().
  void check_slots(Group* group, int32_t table);
  void reserve(const BatchInput& input, Group* group, PlanBuffers* plan, ExternalArena arena);

  PlanShape shape(const Group& group) const;
  int64_t evictions(const Table& table, int32_t t) const;

  // Planning steps that cannot fail.
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
  std::vector<RowRun> runs_;  // runs of the plan that is being made
};

}  // namespace rec_sdk
