#include "torch_npu_ext/engine/lifecycle/eviction.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "torch_npu_ext/engine/lifecycle/removal.h"

namespace rec_sdk {
namespace {

// Returns whether a row has no past timestamp, so that its age begins now: it was loaded without a timestamp,
// or the clock was set back.
bool begins_now(int64_t timestamp, const TableClock& clock) {
  return timestamp == TableClock::kNever || timestamp > clock.timestamp;
}

EvictableIds choose(const Table& table, bool at_interval, bool candidates, std::vector<Evictable>* known) {
  EvictableIds result;
  for (const EvictionRule* const rule : table.spec().rules.evictions()) {
    if (rule->at_intervals() && !at_interval) continue;
    if (candidates && !rule->evicts_candidates()) continue;
    rule->choose(table.clock, known);
    if (!rule->takes_any_number()) continue;
    const auto by_rule = [&](const Evictable& one) { return one.chosen() && one.reason == rule->reason(); };
    result.any_number += std::count_if(known->begin(), known->end(), by_rule);
  }
  std::vector<std::pair<int64_t, EvictReason>> found;
  for (const Evictable& one : *known) {
    if (one.chosen()) found.emplace_back(one.id, one.reason);
  }
  std::sort(found.begin(), found.end());  // because freed rows are reused in this order
  for (const auto& [id, reason] : found) {
    result.ids.push_back(id);
    result.reasons.push_back(static_cast<uint8_t>(reason));
  }
  return result;
}

// Sets the timestamps of rows without a past timestamp to the table's clock, so that they age from now on.
// The next delta save includes this change.
void begin_now(Group* group, int32_t t, const std::vector<std::pair<int64_t, uint32_t>>& rows) {
  Table& table = group->tables[t];
  const bool versioned = table.columns.has(Column::kVersion);
  const uint64_t newest = group->uses.newest_version();
  if (versioned) table.changes.reserve(static_cast<int64_t>(rows.size()), table.row_bound(), newest);
  for (const auto& [id, row] : rows) {
    if (table.snapshot != nullptr) table.snapshot->keep(row, table.columns);
    table.columns.places().set<Column::kTimestamp>(table.columns.record(row), table.clock.timestamp);
    if (versioned) table.changes.add(id, row, table.columns.exchange_version(row, newest));
  }
}

EvictableIds choose_rows(Group* group, int32_t t, bool at_interval) {
  const Table& table = group->tables[t];
  const bool times = at_interval && table.spec().rules.needs_timestamps();
  const ScoreRule* const score = table.spec().rules.score();
  const TableClock& clock = table.clock;
  group->uses.mark_held();
  std::vector<Evictable> known;
  known.reserve(static_cast<size_t>(table.rows()));
  std::vector<std::pair<int64_t, uint32_t>> undated;  // ids and rows without a past timestamp
  table.for_each([&](int64_t id, uint32_t row, uint32_t slot) {
    const RowColumnValues values = table.columns.read(row);
    const bool resident = slot != kNoSlot;
    const uint32_t idle = clock.batches_since(values.last_use);
    Evictable one{id, score == nullptr ? values.count : score->now(values.score, idle), values.timestamp,
                  idle};
    one.held = (resident && group->uses.marked(slot)) ||
               group->window.has(t, row, resident ? static_cast<int64_t>(slot) : -1);
    one.small = row < table.small.size() && table.small[row];
    if (times && begins_now(values.timestamp, clock)) {
      undated.emplace_back(id, row);
      one.timestamp = clock.timestamp;
    }
    known.push_back(one);
  });
  begin_now(group, t, undated);
  return choose(table, at_interval, false, &known);
}

EvictableIds choose_candidates(Table* table, bool at_interval) {
  Admission& admission = *table->admission;
  const bool times = at_interval && table->spec().rules.needs_timestamps();
  std::vector<Evictable> known;
  known.reserve(static_cast<size_t>(admission.candidates.size()));
  admission.candidates.for_each([&](int64_t id, Candidates::Values values) {
    if (times && begins_now(values.timestamp, table->clock)) {
      values.timestamp = table->clock.timestamp;
      admission.candidates.set(admission.candidates.find(id), values);
    }
    const uint32_t idle = table->clock.batches_since(values.last_use);
    known.push_back({id, admission.worth(values), values.timestamp, idle});
  });
  return choose(*table, at_interval, true, &known);
}

}  // namespace

EvictableIds evictable_ids(Group* group, int32_t t, bool at_interval) {
  return choose_rows(group, t, at_interval);
}

int64_t evict_ids(Group* group, int32_t t, bool at_interval) {
  Table& table = group->tables[t];
  const EvictableIds rows = choose_rows(group, t, at_interval);
  const std::vector<int64_t> candidates = choose_candidates(&table, at_interval).ids;
  const int64_t before = table.rows();
  const int64_t removed = remove_ids(group, t, rows.ids.data(), static_cast<int64_t>(rows.ids.size()));
  for (const int64_t id : candidates) table.admission->candidates.erase(id);
  if (!candidates.empty()) table.admission->candidates.shrink();
  table.small.clear();
  group->stats[t].evicted += removed;
  if (2 * rows.any_number > before) group->large_evictions[t] = {rows.any_number, before};
  return removed;
}

}  // namespace rec_sdk
