// A group with its locks, shared by the classes of the API. Their calls may be made from several threads, and
// leave the group unchanged after an exception. The bindings' docstrings describe each call.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <shared_mutex>
#include <utility>
#include <vector>

#include "torch_npu_ext/engine/api/plan_order.h"
#include "torch_npu_ext/engine/base/span.h"
#include "torch_npu_ext/engine/group/group.h"

namespace rec_sdk {

class LockedGroup {
 public:
  explicit LockedGroup(GroupSpec spec) : group(std::move(spec)) {}

  std::unique_lock<std::mutex> lock();
  // Throws std::runtime_error while a plan is not applied or a write-back is pending.
  std::unique_lock<std::mutex> lock_settled(const char* what);

  Group group;
  PlanOrder order;
  // Held shared by copies of records, and exclusively by calls that free or move records. It is taken after
  // lock(), to keep one order of locks.
  std::shared_mutex records_mutex;

 private:
  void catch_up() noexcept;
  void finish(PlanBuffers* plan) noexcept;
  void end(PlanBuffers* plan) noexcept;

  std::mutex mutex_;
};

class GroupAccess {
 public:
  explicit GroupAccess(std::shared_ptr<LockedGroup> shared)
      : shared_(std::move(shared)),
        group_(shared_->group),
        order_(shared_->order),
        records_mutex_(shared_->records_mutex) {}
  const RecordLayout& layout() const { return group_.layout; }

 protected:
  std::unique_lock<std::mutex> lock() { return shared_->lock(); }
  std::unique_lock<std::mutex> lock_settled(const char* what) { return shared_->lock_settled(what); }
  int32_t table_count() const { return static_cast<int32_t>(group_.tables.size()); }
  Table& table(int32_t t);            // throws std::out_of_range
  Table& versioned_table(int32_t t);  // throws std::invalid_argument if the table keeps no versions
  static void check_rows(const Table& table, Span<int64_t> rows);  // throws std::out_of_range

  std::shared_ptr<LockedGroup> shared_;
  Group& group_;
  PlanOrder& order_;
  std::shared_mutex& records_mutex_;
};

}  // namespace rec_sdk
