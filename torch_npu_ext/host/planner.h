// Turns a batch into a swap plan: all of it or, when anything is wrong, nothing.
#pragma once

#include <cstdint>
#include <vector>

#include "torch_npu_ext/host/batch.h"
#include "torch_npu_ext/host/group.h"
#include "torch_npu_ext/host/plan_buffers.h"
#include "torch_npu_ext/host/scan.h"

namespace rec_sdk {

// Ids out of range in index tables, one entry per table that has some. Throws std::out_of_range under kFatal.
void find_bounds_errors(const Group& group, const Batch& batch, std::vector<BoundsError>* errors);

class Planner {
 public:
  // Fills `plan`, whose slots are held until group->uses.release(). After an exception the group is as
  // before.
  void plan(const BatchInput& input, Group* group, PlanBuffers* plan);
  // Undoes the group's latest plan, whose swaps have not touched the cache. Only the order in which rows will
  // be evicted may differ from before.
  static void cancel(PlanBuffers* plan, Group* group) noexcept;

 private:
  // Fallible, in this order, for all tables before anything is committed.
  void begin(Group* group);
  void check_room(Group* group, int32_t table);
  void reserve(Group* group, PlanBuffers* plan);

  int64_t evictions(const Table& table, int32_t t) const;

  // Infallible.
  void commit(Group* group, PlanBuffers* plan) noexcept;
  void swap_table(Group* group, int32_t table, PlanBuffers* plan) noexcept;
  static void evict(Group* group, int32_t table, PlanBuffers* plan) noexcept;
  void bring_in(Group* group, int32_t table, PlanBuffers* plan) noexcept;
  static void move_pending(Group* group, int32_t table, PlanBuffers* plan) noexcept;
  static void touch(Group* group, int32_t table, const PlanBuffers& plan) noexcept;
  static void cancel_table(PlanBuffers* plan, Group* group, int32_t table) noexcept;
  static void cancel_pending(PlanBuffers* plan, Group* group) noexcept;
  static void count(Group* group, const PlanBuffers& plan, int64_t sign) noexcept;
  void count_bounds_errors(Group* group) const noexcept;

  Batch batch_;
  Scan scan_;
  std::vector<BoundsError> bounds_errors_;
};

}  // namespace rec_sdk
