// The host engine of one group: the calls of a batch, whole-table access, saves and the id lifecycle.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "torch_npu_ext/engine/api/lifecycle.h"
#include "torch_npu_ext/engine/api/locked_group.h"
#include "torch_npu_ext/engine/api/saves.h"
#include "torch_npu_ext/engine/api/tables.h"
#include "torch_npu_ext/engine/batch/batch.h"
#include "torch_npu_ext/engine/batch/plan_buffers.h"
#include "torch_npu_ext/engine/plan/planner.h"
#include "torch_npu_ext/engine/plan/reader.h"

namespace rec_sdk {

struct RowRange;

// A handle of a batch's plan. The plan's slots are pinned until release(), which the destructor calls.
// Releasing a plan that is not started cancels it.
class Plan {
 public:
  Plan(std::shared_ptr<LockedGroup> shared, std::shared_ptr<PlanBuffers> buffers, bool pins)
      : shared_(std::move(shared)), buffers_(std::move(buffers)), released_(!pins) {}
  Plan(const Plan&) = delete;
  Plan& operator=(const Plan&) = delete;
  ~Plan() {
    release();
    if (keeps_) --buffers_->kept;
  }

  void release() noexcept;
  void hold() { released_ = false; }
  void keep() {  // the plan is not cancelled while this handle exists
    keeps_ = true;
    ++buffers_->kept;
  }
  bool released() const { return released_; }
  bool written_back() const;
  std::unique_ptr<Plan> next() const;  // null unless the plan is the oldest unapplied one
  Tables::BoundsWarnings bounds_warnings() const;
  std::vector<std::tuple<std::string, int64_t, int64_t, int64_t, int64_t>> rejected_timestamps() const;
  const std::shared_ptr<LockedGroup>& shared() const { return shared_; }
  const std::shared_ptr<PlanBuffers>& buffers() const { return buffers_; }
  const PlanBuffers& operator*() const { return *buffers_; }
  const PlanBuffers* operator->() const { return buffers_.get(); }

 private:
  std::shared_ptr<LockedGroup> shared_;
  std::shared_ptr<PlanBuffers> buffers_;
  std::atomic<bool> released_;
  bool keeps_ = false;
};

// The announcement of a batch that will be planned later. The destructor withdraws it.
class Announcement {
 public:
  Announcement(std::shared_ptr<LockedGroup> shared, uint64_t ticket)
      : shared_(std::move(shared)), ticket_(ticket) {}
  Announcement(const Announcement&) = delete;
  Announcement& operator=(const Announcement&) = delete;
  ~Announcement() { forget(); }

  void forget() noexcept;
  const std::shared_ptr<LockedGroup>& shared() const { return shared_; }
  uint64_t ticket() const { return ticket_; }

 private:
  std::shared_ptr<LockedGroup> shared_;
  uint64_t ticket_;  // 0 if the policy ignores announcements
  std::atomic<bool> forgotten_{false};
};

// The engine of one group. `records` arguments are [rows, record_bytes], `sums` [rows, 2 * dim]; [begin, end)
// are ranges of rows. Calls throw std::invalid_argument for a plan of another engine. The bindings'
// docstrings describe each call.
class Engine : public GroupAccess {
 public:
  explicit Engine(GroupSpec spec) : Engine(std::make_shared<LockedGroup>(std::move(spec))) {}

  Tables tables;
  Saves saves;
  Lifecycle lifecycle;

  std::unique_ptr<Plan> plan(const BatchInput& input, ExternalArena arena = {},
                             const Announcement* announced = nullptr);
  std::unique_ptr<Announcement> announce(const BatchInput& input);
  size_t arena_bytes(
      const BatchInput& input);  // an upper bound, whatever other threads plan before this batch
  std::unique_ptr<ReadPlan> find(const BatchInput& input, int64_t bag_begin, int64_t bag_end);
  std::vector<int64_t> bag_ranges(const BatchInput& input, int64_t max_lookups) const;
  InitialRows read(const ReadPlan& plan, char* records);

  void cancel(const Plan& plan);
  std::vector<std::unique_ptr<Plan>> unapplied(const Plan* upto);
  static void start_plans(const std::vector<const Plan*>& plans);
  void applied(const Plan& plan);
  static bool apply_without_swap(const std::vector<const Plan*>& plans);
  int64_t in_flight();

  // Copy records and sums. The engine's lock is not held while records are copied.
  InitialRows read_in(const Plan& plan, char* records, bool initial = false);
  std::vector<int32_t> read_ahead(const Plan& plan, char* records);
  void read_late(const Plan& plan, Span<int32_t> places, char* records);
  void read_sums(const Plan& plan, float* sums);
  void complete_write_back(const Plan& plan, const char* records, const float* sums);

  void mark(const Plan& plan);
  void mark(const Plan& plan, Span<int32_t> slots);
  bool window_open();
  struct WindowRows {
    std::vector<int32_t> slots, slot_offsets;  // [n] slots of cached rows, ascending; [T + 1]
    std::vector<int64_t> rows;                 // [m] rows outside the cache, ascending within a table
    std::vector<int32_t> row_offsets;          // [T + 1]
  };
  WindowRows window_rows();
  void read_spilled(int64_t begin, int64_t end, char* records, float* sums);
  void write_spilled(int64_t begin, int64_t end, const char* records);
  void close_window();

 private:
  explicit Engine(const std::shared_ptr<LockedGroup>& shared)
      : GroupAccess(shared), tables(shared), saves(shared), lifecycle(shared) {}
  void check_own(const Plan& plan) const;
  void check_written_back(const std::vector<uint64_t>& sources) const;
  void copy_in(const Plan& plan, const std::vector<RowRange>& pieces, char* records) const;

  Planner planner_;
  Reader reader_;
  std::shared_ptr<PlanPool> pool_ = std::make_shared<PlanPool>();
};

}  // namespace rec_sdk
