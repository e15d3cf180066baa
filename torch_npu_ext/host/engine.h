// The host engine of one group: everything callers may do, made safe to call from several threads. After an
// exception the engine is as it was before the call.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "torch_npu_ext/host/batch.h"
#include "torch_npu_ext/host/group.h"
#include "torch_npu_ext/host/plan_buffers.h"
#include "torch_npu_ext/host/planner.h"
#include "torch_npu_ext/host/reader.h"

namespace rec_sdk {

class Engine;

// What one batch needs. Its slots are pinned from hold() until release(), which the destructor calls.
class SwapPlan {
 public:
  SwapPlan(std::shared_ptr<Engine> engine, std::shared_ptr<PlanBuffers> buffers)
      : engine_(std::move(engine)), buffers_(std::move(buffers)) {}
  SwapPlan(const SwapPlan&) = delete;
  SwapPlan& operator=(const SwapPlan&) = delete;
  ~SwapPlan() { release(); }

  void hold() { released_ = false; }
  void release() noexcept;
  bool end() noexcept { return !released_.exchange(true); }  // whether the pins were still held
  bool released() const { return released_; }
  const std::shared_ptr<PlanBuffers>& buffers() const { return buffers_; }
  const PlanBuffers& operator*() const { return *buffers_; }
  const PlanBuffers* operator->() const { return buffers_.get(); }

 private:
  std::shared_ptr<Engine> engine_;
  std::shared_ptr<PlanBuffers> buffers_;
  std::atomic<bool> released_{true};
};

// `records` are [rows, record_bytes], `sums` [rows, 2 * dim]; [begin, end) are ranges of rows.
class Engine : public std::enable_shared_from_this<Engine> {
 public:
  explicit Engine(GroupSpec spec) : group_(std::move(spec)) {}

  const RecordLayout& layout() const { return group_.layout; }
  int32_t table_count() const { return static_cast<int32_t>(group_.tables.size()); }
  int64_t feature_count() const { return static_cast<int64_t>(group_.features.size()); }

  std::unique_ptr<SwapPlan> plan(const BatchInput& input);
  std::unique_ptr<ReadPlan> find(const BatchInput& input, int64_t bag_begin, int64_t bag_end);
  void read(const ReadPlan& plan, char* records, InitialRows* initial = nullptr);

  // Undoes the latest plan, before the cache was written to.
  void cancel(SwapPlan* plan);

  // The swap: write_back what the plan evicts, and read_in what it misses. Before anything else asks for the
  // rows that left, the next plan among it, they have to be written back; the plan may be released by then.
  void write_back(const SwapPlan& plan, const char* records);
  void read_in(const SwapPlan& plan, char* records, InitialRows* initial = nullptr);
  void write_pending(const SwapPlan& plan, const float* sums);
  void read_pending(const SwapPlan& plan, float* sums);  // the sums stay here until the plan is released

  // The accumulation window.
  void mark_pending(const SwapPlan& plan);
  void pending_slots(std::vector<int32_t>* slots, std::vector<int32_t>* table_offsets);
  void pending_away(std::vector<int64_t>* rows, std::vector<int32_t>* table_offsets);
  void read_away(int64_t begin, int64_t end, char* records, float* sums);
  void clear_pending();

  // Whole tables.
  int64_t row_count(int32_t table);
  // Known ids by ascending row; rows have gaps once ids were removed.
  void table_rows(int32_t table, std::vector<int64_t>* ids, std::vector<int32_t>* slots,
                  std::vector<int64_t>* rows = nullptr);
  std::vector<int64_t> kept_rows(int32_t table);  // those with more than their initial record, ascending
  void read_rows(int32_t table, const int64_t* ids, const int64_t* rows, int64_t count, char* records);
  void insert(int32_t table, const int64_t* ids, int64_t count, int64_t* rows, int32_t* slots);
  void write_rows(int32_t table, const int64_t* rows, int64_t count, const char* records);
  void read_columns(int32_t table, const int64_t* rows, int64_t count, RowColumnValues* values);
  int64_t remove(int32_t table, const int64_t* ids, int64_t count);  // remove_ids() says what and when
  void clear_table(int32_t table);
  void initial_records(int32_t table, const int64_t* ids, int64_t count, char* records);

  struct BoundsWarning {
    std::string table;
    int64_t count;
    int64_t example;
  };
  std::vector<BoundsWarning> take_bounds_warnings();

  struct Memory {
    int64_t index_bytes, store_bytes, rows;
  };
  Memory memory();
  void set_memory_limit(int64_t bytes);
  Stats stats();
  void reset_stats();

 private:
  friend class SwapPlan;
  std::unique_lock<std::mutex> lock();
  void defer_release(std::shared_ptr<PlanBuffers> buffers) noexcept;
  void release_deferred();

  Table& table(int32_t t);
  static void insert_ids(Table* table, const int64_t* ids, int64_t count, int64_t* rows, int32_t* slots);

  std::mutex mutex_;
  Group group_;
  Planner planner_;
  Reader reader_;
  const PlanBuffers* latest_ = nullptr;  // buffers of the latest plan, only to compare with
  std::shared_ptr<PlanPool> pool_ = std::make_shared<PlanPool>();

  std::mutex release_mutex_;
  std::vector<std::shared_ptr<PlanBuffers>> to_release_;
};

}  // namespace rec_sdk
