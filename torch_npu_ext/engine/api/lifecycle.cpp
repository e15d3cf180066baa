// The engine's calls on the id lifecycle: eviction, columns, candidates, sketches and clocks.
#include "torch_npu_ext/engine/api/lifecycle.h"

#include <algorithm>
#include <shared_mutex>
#include <stdexcept>

namespace rec_sdk {
namespace {

template <class Values>
void check_one_each(const char* name, const Values& values, int32_t tables) {
  if (static_cast<int32_t>(values.size()) == tables) return;
  throw std::invalid_argument(std::string(name) + " must have one entry per table, " +
                              std::to_string(tables) + ", got " + std::to_string(values.size()));
}

}  // namespace

void Lifecycle::freeze(const std::vector<bool>& frozen) {
  const auto guard = lock_settled("freezing tables");
  check_one_each("frozen", frozen, table_count());
  for (int32_t t = 0; t < table_count(); ++t) group_.tables[t].frozen = frozen[static_cast<size_t>(t)];
}

bool Lifecycle::has_evictable(int32_t t, int64_t interval) const {
  return !group_.tables[t].frozen && (interval_ends(group_.tables[t], interval) || beyond_bound(t));
}

// Does not count ids of plans that are not started, because such plans may be cancelled and planned again.
bool Lifecycle::beyond_bound(int32_t t) const {
  const Table& table = group_.tables[t];
  const Rules& rules = table.spec().rules;
  if (!rules.has_bound()) return false;
  int64_t count = table.rows(), candidates = table.admission->candidates.size();
  order_.for_each([&](const std::shared_ptr<PlanBuffers>& plan) {
    if (plan->state != PlanState::kPlanned) return;
    candidates -= plan->lifecycle_logs[t].candidates_added;
    for (int32_t i = plan->in_offsets[t]; i < plan->in_offsets[t + 1]; ++i) count -= plan->swap_in_added[i];
  });
  const auto due = [&](const EvictionRule* rule) { return rule->due(count, candidates); };
  return std::any_of(rules.evictions().begin(), rules.evictions().end(), due);
}

// Does not count lookups of plans that are not started, for the same reason as beyond_bound().
bool Lifecycle::halves(int32_t t) const {
  const Table& table = group_.tables[t];
  if (table.frozen || !table.admission->halves(0)) return false;
  int64_t planned = 0;
  order_.for_each([&](const std::shared_ptr<PlanBuffers>& plan) {
    if (plan->state == PlanState::kPlanned) planned += plan->lifecycle_logs[t].sketched;
  });
  return table.admission->halves(planned);
}

bool Lifecycle::evicts(const std::vector<int64_t>& intervals) {
  const auto guard = lock();
  check_one_each("intervals", intervals, table_count());
  for (int32_t t = 0; t < table_count(); ++t) {
    if (has_evictable(t, intervals[t]) || halves(t)) return true;
  }
  return false;
}

void Lifecycle::end_step_clocks() {
  for (Table& table : group_.tables) table.clock.steps += !table.frozen;
}

int64_t Lifecycle::end_step(const std::vector<int64_t>& intervals) {
  if (!evicts(intervals)) {
    const auto guard = lock();
    end_step_clocks();
    return 0;
  }
  const auto guard = lock_settled("the end of a step that evicts ids");
  const std::unique_lock<std::shared_mutex> alone(records_mutex_);
  int64_t evicted = 0;
  for (int32_t t = 0; t < table_count(); ++t) {
    const bool ends = interval_ends(group_.tables[t], intervals[t]);
    if (has_evictable(t, intervals[t])) evicted += evict_ids(&group_, t, ends);
    if (halves(t)) group_.tables[t].admission->halve();
  }
  end_step_clocks();
  return evicted;
}

int64_t Lifecycle::evict(int32_t t) {
  const auto guard = lock_settled("the eviction of ids");
  const std::unique_lock<std::shared_mutex> alone(records_mutex_);
  table(t);  // throws std::out_of_range
  return evict_ids(&group_, t, true);
}

std::vector<int32_t> Lifecycle::measured_tables(const std::vector<int64_t>& intervals) {
  const auto guard = lock();
  check_one_each("intervals", intervals, table_count());
  std::vector<int32_t> found;
  for (int32_t t = 0; t < table_count(); ++t) {
    const Table& table = group_.tables[t];
    const bool measured = table.spec().rules.evicts_by(EvictReason::kNorm);
    if (measured && !table.frozen && interval_ends(table, intervals[t])) found.push_back(t);
  }
  return found;
}

void Lifecycle::mark_small(int32_t t, Span<int64_t> rows) {
  const auto guard = lock_settled("marking small rows");
  Table& target = table(t);
  check_rows(target, rows);
  target.small.assign(static_cast<size_t>(target.row_bound()), false);
  for (const int64_t row : rows) target.small[static_cast<size_t>(row)] = true;
}

Lifecycle::LargeEvictions Lifecycle::take_large_evictions() {
  const auto guard = lock();
  LargeEvictions found;
  for (int32_t t = 0; t < table_count(); ++t) {
    auto& [evicted, rows] = group_.large_evictions[t];
    if (evicted == 0) continue;
    found.emplace_back(group_.tables[t].spec().name, evicted, rows, group_.tables[t].clock.timestamp);
    evicted = rows = 0;
  }
  return found;
}

EvictableIds Lifecycle::evictable_ids(int32_t t, bool at_interval) {
  const auto guard = lock_settled("choosing ids to evict");
  table(t);  // throws std::out_of_range
  return rec_sdk::evictable_ids(&group_, t, at_interval);
}

EvictableIds Lifecycle::evictable_ids(int32_t t, const std::vector<int64_t>& intervals) {
  bool ends = false;
  {
    const auto guard = lock();
    const int64_t interval = intervals.at(static_cast<size_t>(t));
    ends = interval_ends(table(t), interval);
    if (!has_evictable(t, interval)) return {};
  }
  return evictable_ids(t, ends);
}

ColumnSet Lifecycle::columns(int32_t t) {
  const auto guard = lock();
  return table(t).spec().columns;
}

std::vector<RowColumnValues> Lifecycle::read_columns(int32_t t, Span<int64_t> rows) {
  const auto guard = lock();
  const Table& source = table(t);
  check_rows(source, rows);
  std::vector<RowColumnValues> values;
  for (const int64_t row : rows) values.push_back(source.columns.read(row));
  return values;
}

void Lifecycle::write_columns(int32_t t, Span<int64_t> rows, const std::vector<RowColumnValues>& values) {
  const auto guard = lock_settled("writing columns of rows");
  Table& target = table(t);
  check_rows(target, rows);
  for (int64_t i = 0; i < rows.size(); ++i) target.columns.write(rows[i], values[i]);
  if (!target.columns.has(Column::kVersion)) return;
  const uint64_t newest = group_.uses.newest_version();
  for (const int64_t row : rows) {
    target.changes.add_unknown(target.columns.exchange_version(row, newest), newest);
  }
}

std::vector<Lifecycle::Candidate> Lifecycle::candidates(int32_t t) {
  const auto guard = lock_settled("listing candidates");
  const Table& source = table(t);
  const Candidates& candidates = source.admission->candidates;
  std::vector<Candidate> found;
  found.reserve(static_cast<size_t>(candidates.size()));
  candidates.for_each([&](int64_t id, const Candidates::Values& values) {
    if (!source.map().find(id, IdMap::hash(id))) found.push_back({id, values});
  });
  std::sort(found.begin(), found.end(), [](const Candidate& a, const Candidate& b) { return a.id < b.id; });
  return found;
}

void Lifecycle::set_candidates(int32_t t, const std::vector<Candidate>& candidates) {
  const auto guard = lock_settled("setting candidates");
  Table& target = table(t);
  for (const Candidate& candidate : candidates) {
    if (candidate.values.count == 0) {
      throw std::invalid_argument("table '" + target.spec().name + "': candidate " +
                                  std::to_string(candidate.id) + " has a count of 0, needs 1 or more");
    }
  }
  if (target.admission->set_candidates(candidates) || candidates.empty()) return;
  throw std::invalid_argument("table '" + target.spec().name +
                              "' does not count ids without a row, so it has no candidates");
}

std::vector<uint8_t> Lifecycle::sketch(int32_t t) {
  const auto guard = lock_settled("reading a sketch");
  return table(t).admission->state();
}

void Lifecycle::set_sketch(int32_t t, const std::vector<std::vector<uint8_t>>& states) {
  const auto guard = lock_settled("setting a sketch");
  Table& target = table(t);
  if (target.admission->set_states(states) || states.empty()) return;
  throw std::invalid_argument("table '" + target.spec().name + "' has no sketch");
}

TableClock Lifecycle::clock(int32_t t) {
  const auto guard = lock();
  return table(t).clock;
}

void Lifecycle::set_clock(int32_t t, const TableClock& clock) {
  const auto guard = lock_settled("setting a clock");
  table(t).clock = clock;
}

}  // namespace rec_sdk
