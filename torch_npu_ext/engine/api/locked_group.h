// A group with its locks, shared by the classes of the engine's API. Several threads may call these classes,
// and a call that throws leaves the group unchanged. The docstrings of the bindings describe each call.
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
  // Locks the group; throws std::runtime_error while a plan is not applied or a write-back is pending.
  std::unique_lock<std::mutex> lock_settled(const char* what);

  Group group;
  PlanOrder order;
  // A copy of records holds this mutex shared; a call that frees or moves records holds it exclusively. It
  // must be taken after lock(), so that all threads take the locks in the same order.
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
