#include "torch_npu_ext/engine/api/locked_group.h"

#include <stdexcept>
#include <string>

#include "torch_npu_ext/engine/plan/planner.h"

namespace rec_sdk {

std::unique_lock<std::mutex> LockedGroup::lock() {
  std::unique_lock<std::mutex> guard(mutex_);
  catch_up();
  return guard;
}

std::unique_lock<std::mutex> LockedGroup::lock_settled(const char* what) {
  std::unique_lock<std::mutex> guard = lock();
  if (!order.empty() || !group.write_backs.empty()) {
    throw std::runtime_error(std::string(what) + " needs all plans applied and all write-backs complete: " +
                             std::to_string(order.size()) + " plans are not applied, the write-backs of " +
                             std::to_string(group.write_backs.size()) + " plans are pending");
  }
  return guard;
}

// Transfers to the group what threads did to plans without its lock since the last call: plans that were
// applied or released, and announcements that were withdrawn.
void LockedGroup::catch_up() noexcept {
  for (const uint64_t ticket : order.take_forgotten()) group.future.forget(ticket);
  while (const std::shared_ptr<PlanBuffers> plan = order.take_applied()) finish(plan.get());
  for (const std::shared_ptr<PlanBuffers>& plan : order.take_ended()) end(plan.get());
  while (const std::shared_ptr<PlanBuffers> plan = order.cancel_released())
    Planner::cancel(plan.get(), &group);
}

void LockedGroup::finish(PlanBuffers* plan) noexcept {
  Planner::finish(*plan, &group);
  plan->finished = true;
  if (plan->ended) group.uses.release(*plan);
}

// A released plan that is neither applied nor the newest stays in the order: it must be applied before the
// plans after it.
void LockedGroup::end(PlanBuffers* plan) noexcept {
  plan->ended = true;
  if (plan->finished) group.uses.release(*plan);
}

Table& GroupAccess::table(int32_t t) {
  if (t >= 0 && t < table_count()) return group_.tables[t];
  throw std::out_of_range("table " + std::to_string(t) + " is not one of the " +
                          std::to_string(table_count()) + " tables of the group");
}

Table& GroupAccess::versioned_table(int32_t t) {
  Table& found = table(t);
  if (found.columns.has(Column::kVersion)) return found;
  throw std::invalid_argument("table '" + found.spec().name + "' does not keep versions of its rows");
}

void GroupAccess::check_rows(const Table& table, Span<int64_t> rows) {
  for (const int64_t row : rows) {
    if (row >= 0 && row < table.row_bound()) continue;
    throw std::out_of_range("table '" + table.spec().name + "': row " + std::to_string(row) +
                            " is not one of its rows, which are below " + std::to_string(table.row_bound()));
  }
}

}  // namespace rec_sdk
