// The host engine of one group: everything callers may do, made safe to call from several threads. After an
// exception the engine is as it was before the call.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <shared_mutex>
#include <string>
#include <vector>

#include "torch_npu_ext/engine/api/plan_order.h"
#include "torch_npu_ext/engine/batch/batch.h"
#include "torch_npu_ext/engine/batch/plan_buffers.h"
#include "torch_npu_ext/engine/group/group.h"
#include "torch_npu_ext/engine/life/eviction.h"
#include "torch_npu_ext/engine/plan/planner.h"
#include "torch_npu_ext/engine/plan/reader.h"

namespace rec_sdk {

class Engine;
struct RowRange;

// A caller's hold on what one batch needs. Its slots are pinned until release(), which the destructor calls.
// A plan that was not applied undoes itself when it is released.
class Plan {
 public:
  Plan(std::shared_ptr<Engine> engine, std::shared_ptr<PlanBuffers> buffers, bool pins)
      : engine_(std::move(engine)), buffers_(std::move(buffers)), released_(!pins) {}
  Plan(const Plan&) = delete;
  Plan& operator=(const Plan&) = delete;
  ~Plan() {
    release();
    if (keeps_) --buffers_->kept;
  }

  void release() noexcept;
  void hold() { released_ = false; }
  void keep() {  // while this is there the plan does not undo itself
    keeps_ = true;
    ++buffers_->kept;
  }
  bool released() const { return released_; }
  Engine* engine() const { return engine_.get(); }
  const std::shared_ptr<PlanBuffers>& buffers() const { return buffers_; }
  const PlanBuffers& operator*() const { return *buffers_; }
  const PlanBuffers* operator->() const { return buffers_.get(); }

 private:
  std::shared_ptr<Engine> engine_;
  std::shared_ptr<PlanBuffers> buffers_;
  std::atomic<bool> released_;
  bool keeps_ = false;
};

// A batch that will be planned later. Dropping it is forgetting it.
class Announcement {
 public:
  Announcement(std::shared_ptr<Engine> engine, uint64_t ticket)
      : engine_(std::move(engine)), ticket_(ticket) {}
  Announcement(const Announcement&) = delete;
  Announcement& operator=(const Announcement&) = delete;
  ~Announcement() { forget(); }

  void forget() noexcept;
  Engine* engine() const { return engine_.get(); }
  uint64_t ticket() const { return ticket_; }

 private:
  std::shared_ptr<Engine> engine_;
  uint64_t ticket_;  // 0 where the policy does not look ahead
  std::atomic<bool> forgotten_{false};
};

// `records` are [rows, record_bytes], `sums` [rows, 2 * dim]; [begin, end) are ranges of rows. A call throws
// std::invalid_argument for a plan of another engine.
//
// A batch: plan; stage (read_in, read_sums), for which the rows of the plan's sources must have landed;
// begin; the cache is written to; applied; land, when the copy of the rows that left has arrived. Plans are
// applied in their order.
class Engine : public std::enable_shared_from_this<Engine> {
 public:
  explicit Engine(GroupSpec spec) : group_(std::move(spec)) {}

  const RecordLayout& layout() const { return group_.layout; }
  int32_t table_count() const { return static_cast<int32_t>(group_.tables.size()); }
  int64_t feature_count() const { return static_cast<int64_t>(group_.features.size()); }

  std::unique_ptr<Plan> plan(const BatchInput& input, ExternalArena arena = {},
                             const Announcement* announced = nullptr);
  // A batch that comes after all those announced and not planned yet: a policy that looks ahead keeps its
  // rows. It counts until it is planned or dropped. Throws std::runtime_error when there are too many.
  std::unique_ptr<Announcement> announce(const BatchInput& input);
  size_t arena_bytes(
      const BatchInput& input);  // enough for the batch, whatever other threads do before its plan
  std::unique_ptr<ReadPlan> find(const BatchInput& input, int64_t bag_begin, int64_t bag_end);
  void read(const ReadPlan& plan, char* records, InitialRows* initial = nullptr);

  // Undoes the newest plan, which must not have begun; so any suffix of the plans, newest first.
  void cancel(Plan* plan);
  // The plans to be applied before and with `upto`, or all with null. Holding them does not pin,
  // but none of them undoes itself meanwhile.
  std::vector<std::unique_ptr<Plan>> unapplied(const Plan* upto);
  // unapplied(&plan), if that is this plan alone; else null.
  std::unique_ptr<Plan> next(const Plan& plan);
  // The cache will be written to: from now on the plan can only be completed. Plans of several groups begin
  // together.
  static void begin(const std::vector<const Plan*>& plans);
  void applied(const Plan& plan);
  // begin() and applied() of plans that bring no row in, if each is the oldest of its engine; else false, and
  // nothing is done.
  static bool pass(const std::vector<const Plan*>& plans);
  int64_t in_flight();  // plans whose pins have not ended

  // Copies, outside the engine's mutex.
  void read_in(const Plan& plan, char* records, InitialRows* initial = nullptr);
  // The same ahead of its time: all records but those of the rows that its sources have yet to land, whose
  // places are returned; and later these, [places, record_bytes].
  std::vector<int32_t> read_ahead(const Plan& plan, char* records);
  void read_late(const Plan& plan, const int32_t* places, int64_t count, char* records);
  void read_sums(const Plan& plan, float* sums);
  void land(const Plan& plan, const char* records, const float* sums);
  bool landed(const Plan& plan);

  // The accumulation window.
  void mark(const Plan&
                plan);  // the plan's rows have sums from now on; or those in `slots`, which are some of them
  void mark(const Plan& plan, const int32_t* slots, int64_t count);
  bool window_open();
  void window_slots(std::vector<int32_t>* slots, std::vector<int32_t>* table_offsets);
  void window_away(std::vector<int64_t>* rows, std::vector<int32_t>* table_offsets);
  void read_away(int64_t begin, int64_t end, char* records, float* sums);
  void write_away(int64_t begin, int64_t end, const char* records);
  void close_window();

  // Whole tables. All plans must be applied and all rows that left the cache landed; std::runtime_error
  // otherwise.
  int64_t row_count(int32_t table);
  // Known ids by ascending row; rows have gaps once ids were removed.
  void table_rows(int32_t table, std::vector<int64_t>* ids, std::vector<int32_t>* slots,
                  std::vector<int64_t>* rows = nullptr);
  // By ascending row, ids of rows that have more than their initial record, or that changed after `since`,
  // for which the table needs the column of versions; `looked_at`: rows whose version was read.
  std::vector<int64_t> kept_ids(int32_t table);
  std::vector<int64_t> changed_ids(int32_t table, uint64_t since, int64_t* looked_at);
  uint64_t version();  // what changes from now on is of a later one
  void read_rows(int32_t table, const int64_t* ids, const int64_t* rows, int64_t count, char* records);
  void find_rows(int32_t table, const int64_t* ids, int64_t count, int64_t* rows, int32_t* slots);
  std::vector<int64_t> others(int32_t table, const int64_t* ids, int64_t count);  // ids known beside these
  void insert(int32_t table, const int64_t* ids, int64_t count, int64_t* rows, int32_t* slots);
  void reserve_rows(int32_t table, const int64_t* rows, int64_t count);
  // `ids`: of the rows.
  void write_rows(int32_t table, const int64_t* ids, const int64_t* rows, int64_t count, const char* records);
  // Rows of a load, none of which is in the cache: insert() of their ids, and write_rows() of records that
  // are made of parts. `whole`: parts that are not there are zero; else they stay. `rows`: out.
  struct RecordPart {
    const char* values;    // [count, bytes]
    int64_t begin, bytes;  // in a record
  };
  void load_rows(int32_t table, const int64_t* ids, int64_t count, const std::vector<RecordPart>& parts,
                 bool whole, int64_t* rows);
  // remove_ids() says what and when.
  int64_t remove(int32_t table, const int64_t* ids, int64_t count, bool candidates = true);
  void clear_table(int32_t table);
  void initial_records(int32_t table, const int64_t* ids, int64_t count, char* records);

  // Saves. Ids of a hash table from bucket `begin` of its map on, at least `least` of them if there are so
  // many; the bucket to go on from, or -1. In no order; each id once, if the table does not change meanwhile.
  int64_t scan_ids(int32_t table, int64_t begin, int64_t least, std::vector<int64_t>* ids);
  // Room for so many more ids: they may then come in any order, that of scan_ids too, which would otherwise
  // crowd one end of a map that grows. Throws MemoryLimitError.
  void reserve_ids(int32_t table, int64_t extra);
  // Ids that were removed after version `since`, with those that came back; false when not all of them are
  // known.
  bool removed_ids(int32_t table, uint64_t since, std::vector<int64_t>* ids);
  void forget_changes(int32_t table, uint64_t upto);  // nothing is asked any more from before it
  uint64_t next_version();  // version(), and if no batch is in flight nothing is of a later one yet
  // Ids of the table's rows in window_slots, in its order, and behind them those of its rows in window_away.
  std::vector<int64_t> window_ids(int32_t table);
  // Sums of rows that are not in the cache and have none yet. Throws std::out_of_range for other rows.
  void put_away(int32_t table, const int64_t* rows, int64_t count, const float* sums);
  // Rows that are in the cache, by slot: ids, their heats as the policy gives them, and the batches that used
  // them last, of which later ones have larger numbers.
  struct CachedRows {
    std::vector<int64_t> ids;
    std::vector<float> heats;
    std::vector<uint32_t> last_batches;
  };
  void cached_rows(int32_t table, CachedRows* cached);
  // Free slots for the first of `ids`, hottest first, that have rows and are not in the cache, as many as
  // fit; the caller writes their records there. Their places among `ids`, rows and slots. An id that a hash
  // table does not know, or has no record of, is passed over, and so is a row whose sums are not in the
  // cache. No batch may be in flight, std::runtime_error; std::out_of_range as find_rows().
  struct WarmRows {
    std::vector<int64_t> places, rows;
    std::vector<int32_t> slots;
  };
  void choose_warm(int32_t table, const int64_t* ids, int64_t count, WarmRows* chosen);
  // The rows of these ids, with their heats, are in these slots from now on, as choose_warm() gave them.
  // std::invalid_argument where they cannot be: something happened in between.
  void warm(int32_t table, const int64_t* ids, const int32_t* slots, const float* heats, int64_t count);

  // A snapshot: the rows of `ids`, or with null all rows, as they are now; how many. All must be settled.
  // Taken rows are no longer pending. A row is taken before it is changed, except by plans that count it: the
  // engine keeps its old columns. If a row has a slot, the caller reads its record, in the cache, before it
  // lets others apply or update. Rows that plans move are left for later; when all is settled none
  // are.
  struct TakenRows {
    std::vector<int64_t> ids;
    std::vector<int32_t> slots;  // or kNoSlot: the record is here
    std::vector<uint32_t> rows;
    UnsetBytes records;                    // [rows, record_bytes]; none where all have a slot
    std::vector<RowColumnValues> columns;  // none where saves have none

    void reserve(size_t count, bool with_columns) {
      ids.reserve(count);
      slots.reserve(count);
      rows.reserve(count);
      if (with_columns) columns.reserve(count);
    }
  };
  int64_t open_snapshot(int32_t table, const int64_t* ids, int64_t count);
  // The same of the rows that changed after version `since`, as changed_ids() names them; take_next() takes
  // those, by ascending row. Nothing is sorted before: training waits.
  int64_t open_snapshot_since(int32_t table, uint64_t since);
  void close_snapshot(int32_t table);  // if there is one
  int64_t snapshot_pending(int32_t table);
  void take_ids(int32_t table, const int64_t* ids, int64_t count, TakenRows* taken);
  void take_slots(int32_t table, const int32_t* slots, int64_t count,
                  TakenRows* taken);  // of plans in flight
  // From a place on, 0 at first, at least so many; the place to go on from, or -1. Where the table changed
  // meanwhile rows may be left behind: begin again until none is pending.
  int64_t take_next(int32_t table, int64_t begin, int64_t least, TakenRows* taken);
  // Ids that evict(), or end_step(), will take out of the table, and why.
  LeavingIds leaving_ids(int32_t table, bool at_interval);
  LeavingIds leaving_ids(int32_t table, const std::vector<int64_t>& intervals);

  // Admission and eviction of ids. A training step has ended: ids leave where an interval of so many steps
  // does, by table, or a bound is passed, for which all must be settled as for whole tables; how many left.
  // evicts() says whether some will. The bound knows only batches that have begun.
  int64_t end_step(const std::vector<int64_t>& intervals);
  bool evicts(const std::vector<int64_t>& intervals);
  // Frozen tables, one flag each: see Table::frozen. All must be settled.
  void freeze(const std::vector<bool>& frozen);
  int64_t evict(int32_t table);  // now, by every rule of the table
  // Tables of which end_step() takes out rows with small weights. The caller measures, and marks them before.
  std::vector<int32_t> measured_tables(const std::vector<int64_t>& intervals);
  void mark_small(int32_t table, const int64_t* rows, int64_t count);  // these and no others
  struct LargeEviction {
    std::string table;
    int64_t evicted, rows, timestamp;  // of so many rows; the latest timestamp of the table
  };
  std::vector<LargeEviction> take_large_evictions();  // since the last call: of more than half of a table
  struct SetAside {
    std::string table;
    int64_t count, id, timestamp, latest;  // of how many lookups, one of them, and the latest of the table
  };
  std::vector<SetAside> set_aside(const Plan& plan) const;  // timestamps too far ahead
  Rules rules(int32_t table) { return this->table(table).spec().rules; }
  ColumnSet columns(int32_t table);
  void read_columns(int32_t table, const int64_t* rows, int64_t count, RowColumnValues* values);
  void write_columns(int32_t table, const int64_t* rows, int64_t count, const RowColumnValues* values);
  using Candidate = LifeLog::Counted;
  std::vector<Candidate> candidates(int32_t table);  // by ascending id
  // These and no others. A sketch begins anew with their counts.
  void set_candidates(int32_t table, const std::vector<Candidate>& candidates);
  // The state of a sketch, or nothing without one; it counts what these do, each a state of one: CountSketch.
  std::vector<uint8_t> sketch(int32_t table);
  void set_sketch(int32_t table, const std::vector<std::vector<uint8_t>>& states);
  LifeClock clock(int32_t table);
  void set_clock(int32_t table, const LifeClock& clock);

  struct BoundsWarning {
    std::string table;
    int64_t count;
    int64_t example;
  };
  std::vector<BoundsWarning> take_bounds_warnings();  // of reads
  std::vector<BoundsWarning> bounds_warnings(const Plan& plan) const;

  static constexpr int32_t kAllTables = -1;
  struct Memory {
    int64_t index_bytes, store_bytes, disk_bytes, column_bytes, rows, candidates, candidate_bytes;
  };
  // Sizes of one table, or of all: batches are counted once.
  Memory memory(int32_t table = kAllTables);
  void set_memory_limit(int64_t bytes);
  Stats stats(int32_t table = kAllTables);
  int64_t pinned(int32_t table = kAllTables);  // slots that batches in flight hold
  void reset_stats();

 private:
  friend class Plan;
  friend class Announcement;
  std::unique_lock<std::mutex> lock();
  std::unique_lock<std::mutex> lock_settled(const char* what);
  void catch_up() noexcept;
  void finish(PlanBuffers* plan) noexcept;
  void end(PlanBuffers* plan) noexcept;
  void check_own(const Plan& plan) const;
  void check_landed(const std::vector<uint64_t>& sources) const;
  bool beyond_bound(int32_t table) const;
  bool halves(int32_t table) const;
  bool has_leaving(int32_t table, int64_t interval) const;
  void end_step_clocks();
  template <class Visit>
  void for_each_moving_row(int32_t table, const Visit& visit) const;
  void mark_moving(int32_t table, Snapshot* snapshot) const;
  static void take(Table* source, int64_t id, uint32_t row, uint32_t slot, TakenRows* taken);
  static void take_listed(Table* source, int64_t* at, int64_t least, TakenRows* taken);
  void copy_records(const Table& source, TakenRows* taken) const;
  static void check_rows(const Table& table, const int64_t* rows, int64_t count);
  void copy_in(const Plan& plan, const std::vector<RowRange>& pieces, char* records) const;

  Table& table(int32_t t);
  std::pair<int32_t, int32_t> tables(int32_t table);  // [first, end) of one or all
  static void insert_ids(Table* table, const int64_t* ids, int64_t count, int64_t* rows, int32_t* slots);

  std::mutex mutex_;
  // Shared by copies of records; alone by what frees or moves them. Taken after mutex_.
  std::shared_mutex records_mutex_;
  Group group_;
  Planner planner_;
  Reader reader_;
  PlanOrder order_;
  std::shared_ptr<PlanPool> pool_ = std::make_shared<PlanPool>();
};

}  // namespace rec_sdk
