// A group whose plans are made ahead, applied, cancelled, dropped and written back in random order, and
// checks of the invariants that must hold at any time.
#pragma once

#include <deque>
#include <memory>
#include <numeric>
#include <set>
#include <stdexcept>
#include <utility>

#include "tests/engine/model.h"
#include "torch_npu_ext/engine/base/errors.h"

namespace rec_sdk {

class Pipeline {
 public:
  static constexpr int64_t kDim = 2;
  static constexpr size_t kWidth = 2 * kDim;
  static constexpr int32_t kTables = 2;
  static constexpr int64_t kSlots[kTables] = {14, 9};
  using Row = std::pair<int32_t, int64_t>;  // (table, id)

  static GroupSpec spec() {
    const Initializer init("uniform", -1, 1, 0, 1);
    GroupSpec spec{{{"a", true, 10, kSlots[0], 0, init, 1, {}, BoundsCheck::kFatal},
                    {"b", false, 30, kSlots[1], 0, init, 2, {}, BoundsCheck::kFatal}},
                   make_record_layout(kDim, DType::kFloat32, nullptr, 0),
                   {{0, 0, false}, {1, 0, false}},
                   false,
                   "lru"};
    for (TableSpec& table : spec.tables) table.columns = {Column::kVersion};
    return spec;
  }

  explicit Pipeline(uint64_t seed) : random(seed), engine(std::make_shared<Engine>(spec())) {
    cache_.resize(kSlots[0] + kSlots[1]);
    sums_.resize(cache_.size());
  }

  void plan() {
    TestBatch batch = random_batch();
    const Stats before = engine->tables.stats();
    std::unique_ptr<Plan> plan;
    try {
      plan = engine->plan(batch.input());
    } catch (const CacheTooSmallError&) {
      ++refused;
      CHECK(same(before, engine->tables.stats()));
      return;
    }
    Made made;
    made.lookups = lookups(batch);
    made.serial = (*plan)->serial;
    made.residents_before = residents_;
    made.known_before = known_;
    made.stats_before = before;
    check_sources(*plan);
    follow(**plan, &made);
    made.plan = std::move(plan);
    planned.push_back(std::move(made));
  }

  void cancel_newest() {
    if (planned.empty()) return;
    if (planned.size() > 1 && planned.front().plan != nullptr) {
      CHECK_THROWS(engine->cancel(*planned.front().plan), std::runtime_error);
    }
    const auto plan = std::move(planned.back().plan);
    engine->cancel(*plan);
    CHECK_THROWS(engine->cancel(*plan), std::runtime_error);
    CHECK_THROWS(engine->unapplied(plan.get()), std::runtime_error);
    if (random() % 2 == 0) plan->release();
    undo_newest();
    undo_dropped();
    ++cancelled;
  }

  // Drops a random pending plan. It is cancelled as soon as it is the newest plan.
  void drop() {
    if (planned.empty()) return;
    Made& made = planned[random() % planned.size()];
    if (made.plan == nullptr) return;
    dropped_in_the_middle += made.serial != planned.back().serial;
    made.plan.reset();
    undo_dropped();
  }

  // Reads the missing rows of a random pending plan ahead, while earlier plans or their write-backs are
  // pending.
  void read_ahead() {
    if (planned.empty()) return;
    Made& made = planned[random() % planned.size()];
    if (made.plan == nullptr) return;
    made.ahead.resize(static_cast<size_t>((*made.plan)->rows_in * bytes()));
    made.late = engine->read_ahead(*made.plan, made.ahead.data());
    ++read_aheads;
    late_rows += made.late.size();
  }

  void apply_oldest() {
    if (planned.empty()) return;
    auto handles = engine->unapplied(nullptr);
    CHECK(handles.size() == planned.size());
    Made made = std::move(planned.front());
    std::unique_ptr<Plan> handle = std::move(handles.front());
    const PlanBuffers& p = **handle;
    CHECK(p.serial == made.serial);
    CHECK(handle->next() != nullptr);
    if (handles.size() > 1) CHECK(handles.back()->next() == nullptr);
    if (handles.size() > 1) CHECK_THROWS(Engine::start_plans({handles.back().get()}), std::runtime_error);
    CHECK_THROWS(engine->applied(*handle), std::runtime_error);
    std::vector<char> in(static_cast<size_t>(p.rows_in * bytes()));
    land_sources(*handle, in.data());
    Leaving leaving = take_out(p);
    if (p.rows_out > 0) {
      CHECK_THROWS(engine->complete_write_back(*handle, leaving.records.data(), leaving.sums.data()),
                   std::runtime_error);
    }
    engine->read_in(*handle, in.data());
    check_ahead(made, *handle, in);
    std::vector<float> sums_in(static_cast<size_t>(p.window_in) * kWidth);
    engine->read_sums(*handle, sums_in.data());
    Engine::start_plans({handle.get()});
    CHECK_THROWS(engine->cancel(*handle), std::runtime_error);
    for (int64_t i = 0; i < p.rows_in; ++i) cache_[p.swap_in_slots[i]] = weight(&in[i * bytes()]);
    for (int64_t i = 0; i < p.window_out; ++i) sums_[p.window_out_slots[i]] = 0;
    for (int64_t i = 0; i < p.window_in; ++i) sums_[p.window_in_slots[i]] = sums_in[i * kWidth];
    // If the download of the victims ends early, the write-back is completed while the plan is still being
    // applied.
    const bool early = random() % 4 == 0;
    if (early && p.rows_out > 0) land(*handle, leaving);
    engine->applied(*handle);
    CHECK_THROWS(engine->applied(*handle), std::runtime_error);
    Engine::start_plans({handle.get()});  // ignored, because the plan is applied
    for (size_t i = 0; i < made.lookups.size(); ++i) {
      CHECK(cache_[p.slots[i]] == expected(made.lookups[i]));
      const auto sum = sums.find(made.lookups[i]);
      CHECK(sums_[p.slots[i]] == (sum == sums.end() ? 0 : sum->second));
    }
    planned.pop_front();
    if (!early && p.rows_out > 0) {
      leaving.plan = std::move(handle);
      leaving_.emplace(made.serial, std::move(leaving));
    }
    if (made.plan != nullptr) held.push_back(std::move(made));
    ++applied;
  }

  // Runs the backward pass of a batch in flight, or none, and releases its pins.
  void finish() {
    if (held.empty()) return;
    const size_t which = random() % 3 == 0 ? random() % held.size() : 0;
    const Made made = std::move(held[which]);
    held.erase(held.begin() + static_cast<int64_t>(which));
    const PlanBuffers& p = **made.plan;
    const auto kind = random() % 3;
    if (kind == 0) engine->mark(*made.plan);
    for (size_t i = 0; i < made.lookups.size() && kind < 2; ++i) {
      ++changes_;
      if (kind == 0) {
        sums_[p.slots[i]] = sums[made.lookups[i]] = static_cast<float>(changes_);
      } else {
        cache_[p.slots[i]] = static_cast<float>(changes_);
        changed(made.lookups[i]);
      }
    }
    if (random() % 2 == 0) made.plan->release();
  }

  void land_some() {
    if (leaving_.empty()) return;
    auto leaving = leaving_.begin();
    std::advance(leaving, random() % leaving_.size());
    land(*leaving->second.plan, leaving->second);
    land(*leaving->second.plan, leaving->second);  // completing it again has no effect
    leaving_.erase(leaving);
  }

  void take_version() {
    versions_.push_back({random() % 3 == 0 ? engine->saves.version() : engine->saves.next_version(), {}});
  }

  void settle() {
    while (!planned.empty()) apply_oldest();
    while (!leaving_.empty()) land_some();
  }

  // Checks the invariants for the plans, counters and window.
  void check() {
    CHECK(engine->in_flight() == static_cast<int64_t>(planned.size() + held.size()));
    const Stats stats = engine->tables.stats();
    CHECK(same(stats, stats_));
    const auto handles = engine->unapplied(nullptr);
    CHECK(handles.size() == planned.size());
    for (size_t i = 0; i < handles.size() && i < planned.size(); ++i) {
      CHECK((*handles[i])->serial == planned[i].serial);
    }
    CHECK(engine->window_open() == !sums.empty());
    if (!planned.empty() || !departures_.empty())
      CHECK_THROWS(engine->saves.ids_with_records(0), std::runtime_error);
  }

  // The following calls on whole tables are defined in pipeline_tables.h. check_tables() checks all rows when
  // no batch is in flight.
  void check_tables();
  // Closes the accumulation window, which changes all of its rows.
  void close_window();
  void write_some();
  void remove_some();

  std::mt19937_64 random;
  std::shared_ptr<Engine> engine;
  std::map<Row, float> sums;

  struct Made {
    std::unique_ptr<Plan> plan;  // null after the plan was dropped
    uint64_t serial;
    std::vector<Row> lookups;
    std::map<Row, int32_t> residents_before;
    std::set<Row> known_before;
    Stats stats_before;
    std::vector<char> ahead;  // records of missing rows that were read ahead, without late rows
    std::vector<int32_t> late;
  };
  std::deque<Made> planned, held;  // plans that are pending; plans that are applied and in flight
  int64_t applied = 0, cancelled = 0, undone_by_drop = 0, dropped_in_the_middle = 0, refused = 0;
  int64_t waited = 0, unchanged = 0, not_looked_at = 0, read_aheads = 0;
  size_t late_rows = 0;

 private:
  struct Leaving {
    std::unique_ptr<Plan> plan;
    std::vector<char> records;
    std::vector<float> sums;
  };
  struct Version {
    uint64_t number;
    std::set<Row> changed;
  };

  template <int32_t table>
  static bool in(const Row& row) {
    return row.first == table;
  }
  int64_t bytes() const { return engine->layout().bytes; }
  static float weight(const char* record) {
    float value;
    std::memcpy(&value, record, sizeof value);
    return value;
  }
  static void set_weight(char* record, float value) { std::memcpy(record, &value, sizeof value); }
  // Checks that the rows that were read ahead, completed by the late rows, equal the rows that are read now.
  void check_ahead(Made& made, const Plan& plan, const std::vector<char>& in) {
    if (made.ahead.empty()) return;
    std::vector<char> late(made.late.size() * static_cast<size_t>(bytes()));
    engine->read_late(plan, made.late, late.data());
    for (size_t k = 0; k < made.late.size(); ++k) {
      std::memcpy(&made.ahead[made.late[k] * bytes()], &late[k * bytes()], static_cast<size_t>(bytes()));
    }
    CHECK(made.ahead == in);
    if (made.late.empty()) return;
    made.late.push_back(made.late.back());
    CHECK_THROWS(engine->read_late(plan, made.late, late.data()), std::invalid_argument);
  }
  static int64_t new_rows(const PlanBuffers& plan) {
    return std::accumulate(plan.table_new_rows.begin(), plan.table_new_rows.end(), int64_t{0});
  }
  static bool same(const Stats& a, const Stats& b) {
    return a.batches == b.batches && a.lookups == b.lookups && a.unique_rows == b.unique_rows &&
           a.unique_misses == b.unique_misses && a.new_rows == b.new_rows && a.rows_in == b.rows_in &&
           a.rows_out == b.rows_out && a.bytes_in == b.bytes_in && a.bytes_out == b.bytes_out;
  }

  TestBatch random_batch() {
    TestBatch batch;
    batch.batch_size = 1;
    batch.keys = {0, 1};
    for (int key = 0; key < kTables; ++key) {
      for (size_t i = random() % 6; i > 0; --i) batch.values.push_back(static_cast<int64_t>(random() % 30));
      batch.offsets.push_back(static_cast<int64_t>(batch.values.size()));
    }
    return batch;
  }

  static std::vector<Row> lookups(const TestBatch& batch) {
    std::vector<Row> rows;
    for (int64_t i = 0; i < batch.offsets[2]; ++i) rows.emplace_back(i >= batch.offsets[1], batch.values[i]);
    return rows;
  }

  float expected(const Row& row) {
    const auto found = weights_.find(row);
    if (found != weights_.end()) return found->second;
    std::vector<char> record(static_cast<size_t>(bytes()));
    engine->tables.initial_records(row.first, {&row.second, 1}, record.data());
    return weight(record.data());
  }

  void changed(const Row& row) { changed(row, static_cast<float>(changes_)); }
  void changed(const Row& row, float value) {
    weights_[row] = value;
    for (Version& version : versions_) version.changed.insert(row);
  }

  template <class Visit>
  static void for_each_in(const PlanBuffers& p, Visit visit) {
    for (int32_t t = 0; t < kTables; ++t) {
      for (int32_t i = p.in_offsets[t]; i < p.in_offsets[t + 1]; ++i) visit(i, Row{t, p.swap_in_ids[i]});
    }
  }
  template <class Visit>
  static void for_each_out(const PlanBuffers& p, Visit visit) {
    for (int32_t t = 0; t < kTables; ++t) {
      for (int32_t i = p.out_offsets[t]; i < p.out_offsets[t + 1]; ++i) visit(i, Row{t, p.swap_out_ids[i]});
    }
  }

  // Checks that the sources of a plan are exactly the pending write-backs of its rows in. No row has two
  // pending write-backs, because the first one was completed before the row was fetched again.
  void check_sources(const Plan& plan) {
    std::set<uint64_t> wanted;
    int64_t fresh = 0;
    for_each_in(*plan, [&](int32_t, const Row& row) {
      uint64_t source = 0;
      for (const auto& [serial, rows] : departures_) {
        if (rows.count(row) == 0) continue;
        CHECK(source == 0);
        source = serial;
      }
      if (source != 0) wanted.insert(source);
      fresh += source == 0 && stored_.count(row) == 0;
    });
    CHECK(std::set<uint64_t>(plan->sources.begin(), plan->sources.end()) == wanted);
    CHECK(plan->sources.size() == wanted.size());
    CHECK(new_rows(*plan) == fresh);
  }

  bool is_held(const Row& row) const {
    const auto has = [&](const Made& made) {
      return std::find(made.lookups.begin(), made.lookups.end(), row) != made.lookups.end();
    };
    return std::any_of(planned.begin(), planned.end(), has) || std::any_of(held.begin(), held.end(), has);
  }

  // Updates the expected slots of rows to the state after the plan is applied.
  void follow(const PlanBuffers& p, Made* made) {
    std::vector<int64_t> window_out, window_in;
    std::set<Row> out;
    for_each_out(p, [&](int32_t i, const Row& row) {
      CHECK(residents_.count(row) == 1 && residents_[row] == p.swap_out_slots[i]);
      CHECK(!is_held(row));
      residents_.erase(row);
      out.insert(row);
      if (sums.count(row) != 0) window_out.push_back(p.swap_out_slots[i]);
    });
    std::set<int32_t> used;
    for (const auto& row_and_slot : residents_) used.insert(row_and_slot.second);
    for_each_in(p, [&](int32_t i, const Row& row) {
      CHECK(residents_.count(row) == 0 && used.insert(p.swap_in_slots[i]).second);
      residents_[row] = p.swap_in_slots[i];
      if (sums.count(row) != 0) window_in.push_back(p.swap_in_slots[i]);
    });
    CHECK(window_out == std::vector<int64_t>(p.window_out_slots, p.window_out_slots + p.window_out));
    CHECK(window_in == std::vector<int64_t>(p.window_in_slots, p.window_in_slots + p.window_in));
    std::set<Row> uniques;
    for (size_t i = 0; i < made->lookups.size(); ++i) {
      const Row& row = made->lookups[i];
      CHECK(residents_.count(row) == 1 && residents_[row] == p.slots[i]);
      known_.insert(row);
      uniques.insert(row);
    }
    CHECK(p.uniques == static_cast<int64_t>(uniques.size()));
    if (!out.empty()) departures_[made->serial] = std::move(out);
    stats_.batches += 1;
    stats_.lookups += p.lookups;
    stats_.unique_rows += p.uniques;
    stats_.unique_misses += p.rows_in;
    stats_.rows_in += p.rows_in;
    stats_.rows_out += p.rows_out;
    stats_.bytes_in += p.rows_in * bytes();
    stats_.bytes_out += p.rows_out * bytes();
    stats_.new_rows += new_rows(p);
  }

  void undo_newest() {
    Made& made = planned.back();
    residents_ = std::move(made.residents_before);
    known_ = std::move(made.known_before);
    stats_ = made.stats_before;
    departures_.erase(made.serial);
    planned.pop_back();
  }

  void undo_dropped() {
    while (!planned.empty() && planned.back().plan == nullptr) {
      undo_newest();
      ++undone_by_drop;
    }
  }

  void land_sources(const Plan& plan, char* records) {
    for (const uint64_t serial : plan->sources) {
      const auto leaving = leaving_.find(serial);
      if (leaving == leaving_.end()) {
        CHECK(departures_.count(serial) == 0);  // completed before
        continue;
      }
      CHECK_THROWS(engine->read_in(plan, records), std::runtime_error);
      land(*leaving->second.plan, leaving->second);
      leaving_.erase(leaving);
      ++waited;
    }
  }

  Leaving take_out(const PlanBuffers& p) {
    Leaving leaving;
    leaving.records.resize(static_cast<size_t>(p.rows_out * bytes()));
    for (int64_t i = 0; i < p.rows_out; ++i) {
      set_weight(&leaving.records[i * bytes()], cache_[p.swap_out_slots[i]]);
    }
    leaving.sums.resize(static_cast<size_t>(p.window_out) * kWidth);
    for (int64_t i = 0; i < p.window_out; ++i) leaving.sums[i * kWidth] = sums_[p.window_out_slots[i]];
    return leaving;
  }

  void land(const Plan& plan, const Leaving& leaving) {
    CHECK(plan.written_back() == (departures_.count(plan->serial) == 0));
    engine->complete_write_back(plan, leaving.records.data(), leaving.sums.data());
    CHECK(plan.written_back());
    const std::set<Row>& rows = departures_[plan->serial];
    stored_.insert(rows.begin(), rows.end());
    departures_.erase(plan->serial);
  }

  void check_versions(int32_t t, const std::vector<int64_t>& kept) {
    const auto [ids, slots, rows] = engine->tables.rows(t);
    const std::vector<RowColumnValues> columns = engine->lifecycle.read_columns(t, rows);
    for (const Version& version : versions_) {
      const auto [given, looked_at] = engine->saves.changed_ids(t, version.number);
      const std::set<int64_t> listed(given.begin(), given.end());
      CHECK(listed.size() == given.size());
      for (const Row& row : version.changed) CHECK(row.first != t || listed.count(row.second) == 1);
      for (size_t i = 0; i < ids.size(); ++i) {
        CHECK(listed.count(ids[i]) == (columns[i].version > version.number ? 1 : 0));
      }
      for (const int64_t id : kept) unchanged += listed.count(id) == 0;
      not_looked_at += static_cast<int64_t>(ids.size()) - looked_at;
    }
    if (versions_.size() > 6) {
      versions_.erase(versions_.begin());
      uint64_t earliest = UINT64_MAX;
      for (const Version& version : versions_) earliest = std::min(earliest, version.number);
      engine->saves.forget_changes(t, earliest);
    }
  }

  template <class Visit>  // visit(row, sum, record), which may be changed
  void for_each_away(Visit visit) {
    const auto [resident, resident_offsets, rows, offsets] = engine->window_rows();
    const int64_t count = static_cast<int64_t>(rows.size());
    std::vector<char> records(static_cast<size_t>(count * bytes()));
    std::vector<float> away(static_cast<size_t>(count) * kWidth);
    engine->read_spilled(0, count, records.data(), away.data());
    for (int32_t t = 0; t < kTables; ++t) {
      const auto [ids, slots, numbers] = engine->tables.rows(t);
      for (int32_t i = offsets[t]; i < offsets[t + 1]; ++i) {
        const auto found = std::lower_bound(numbers.begin(), numbers.end(), rows[i]);
        CHECK(found != numbers.end() && *found == rows[i]);
        visit(Row{t, ids[static_cast<size_t>(found - numbers.begin())]}, away[i * kWidth],
              &records[i * bytes()]);
      }
    }
    engine->write_spilled(0, count, records.data());
  }

  std::vector<float> cache_, sums_;  // of the row in each slot
  std::map<Row, int32_t> residents_;
  std::set<Row> known_, stored_;  // rows in the tables; rows with a record in the host store
  std::map<uint64_t, std::set<Row>> departures_;
  std::map<uint64_t, Leaving> leaving_;
  std::map<Row, float> weights_;
  std::vector<Version> versions_;
  Stats stats_;
  int64_t changes_ = 10;
};

}  // namespace rec_sdk

#include "tests/engine/pipeline_tables.h"
