#include "torch_npu_ext/engine/life/eviction.h"

#include <algorithm>
#include <tuple>
#include <utility>
#include <vector>

#include "torch_npu_ext/engine/life/removal.h"

namespace rec_sdk {
namespace {

// A row or a candidate. The choice depends on no row number: those depend on what came and left before.
struct Known {
  int64_t id;
  double score;       // or the count
  uint32_t idle;      // batches since the last that had it
  bool held = false;  // it has to stay for now
  LeaveReason reason = LeaveReason::kNone;
  bool leaves() const { return reason != LeaveReason::kNone && !held; }
};

bool older(const LifeSpec& life, const LifeClock& clock, int64_t timestamp) {
  return life.evict_age > 0 &&
         timestamp<clock.timestamp&& static_cast<uint64_t>(clock.timestamp) -
                   static_cast<uint64_t>(timestamp)> static_cast<uint64_t>(life.evict_age);
}

// It was loaded without one, or the clock was set back.
bool begins_now(int64_t timestamp, const LifeClock& clock) {
  return timestamp == LifeClock::kNever || timestamp > clock.timestamp;
}

bool idle(const LifeSpec& life, uint32_t batches) {
  return life.evict_idle > 0 && static_cast<int64_t>(batches) >= life.evict_idle;
}

// The `count` of them that are worth the least leave, those first that were idle for longer.
void choose_least(std::vector<Known*> known, int64_t count) {
  if (count <= 0) return;
  const auto before = [](const Known* a, const Known* b) {
    return std::make_tuple(a->score, ~a->idle, a->id) < std::make_tuple(b->score, ~b->idle, b->id);
  };
  std::nth_element(known.begin(), known.begin() + count - 1, known.end(), before);
  for (int64_t i = 0; i < count; ++i) known[static_cast<size_t>(i)]->reason = LeaveReason::kBound;
}

// At least one, as in Rec SDK.
int64_t share_of(int64_t rows, double share) {
  return share <= 0 || rows == 0
             ? 0
             : std::max<int64_t>(1, static_cast<int64_t>(static_cast<double>(rows) * share));
}

// The share of the lowest scores. Among equal scores the lower id leaves.
void choose_share(std::vector<Known>* known, double share) {
  const int64_t count = share_of(static_cast<int64_t>(known->size()), share);
  if (count == 0) return;
  std::vector<Known*> all;
  for (Known& one : *known) all.push_back(&one);
  const auto before = [](const Known* a, const Known* b) {
    return std::make_tuple(a->score, a->id) < std::make_tuple(b->score, b->id);
  };
  std::nth_element(all.begin(), all.begin() + count - 1, all.end(), before);
  for (int64_t i = 0; i < count; ++i) {
    LeaveReason& reason = all[static_cast<size_t>(i)]->reason;
    if (reason == LeaveReason::kNone) reason = LeaveReason::kScore;
  }
}

void choose_beyond(std::vector<Known>* known, const LifeSpec& life) {
  if (life.max_rows == 0) return;
  std::vector<Known*> free;
  int64_t staying = 0;
  for (Known& one : *known) {
    if (one.leaves()) continue;
    ++staying;
    if (!one.held) free.push_back(&one);
  }
  if (staying <= life.max_rows) return;
  const int64_t count = std::min(staying - life.rows_after_eviction(), static_cast<int64_t>(free.size()));
  choose_least(std::move(free), count);
}

// By age or idleness.
LeaveReason overdue(const LifeSpec& life, const LifeClock& clock, int64_t timestamp, uint32_t batches) {
  if (older(life, clock, timestamp)) return LeaveReason::kAge;
  return idle(life, batches) ? LeaveReason::kIdle : LeaveReason::kNone;
}

// Whether rows leave by such a rule however many they are: a clock that is wrong can empty a table.
bool takes_any_number(uint8_t reason) {
  const LeaveReason rule = static_cast<LeaveReason>(reason);
  return rule == LeaveReason::kAge || rule == LeaveReason::kIdle || rule == LeaveReason::kNorm;
}

LeavingIds leaving(const std::vector<Known>& known) {
  std::vector<std::pair<int64_t, LeaveReason>> found;
  for (const Known& one : known) {
    if (one.leaves()) found.emplace_back(one.id, one.reason);
  }
  std::sort(found.begin(), found.end());  // rows that are free are given to others in this order
  LeavingIds result;
  for (const auto& [id, reason] : found) {
    result.ids.push_back(id);
    result.reasons.push_back(static_cast<uint8_t>(reason));
  }
  return result;
}

// Rows without a timestamp of the past have that of the clock from now on, which is a change for the next
// delta.
void begin_now(Group* group, int32_t t, const std::vector<std::pair<int64_t, uint32_t>>& rows) {
  Table& table = group->tables[t];
  const bool versioned = table.columns.has(Column::kVersion);
  const uint64_t newest = group->uses.newest_version();
  if (versioned) table.changes.reserve(static_cast<int64_t>(rows.size()), table.row_bound(), newest);
  for (const auto& [id, row] : rows) {
    if (table.snapshot != nullptr) table.snapshot->keep(row, table.columns);
    table.columns.places().set<Column::kTimestamp>(table.columns.record(row), table.clock.timestamp);
    if (versioned) table.changes.add(id, table.columns.exchange_version(row, newest));
  }
}

LeavingIds choose_rows(Group* group, int32_t t, bool at_interval) {
  const Table& table = group->tables[t];
  const LifeSpec& life = table.spec().life;
  const LifeClock& clock = table.clock;
  group->uses.mark_held();
  std::vector<Known> known;
  known.reserve(static_cast<size_t>(table.rows()));
  std::vector<std::pair<int64_t, uint32_t>> begun;  // ids and rows
  table.for_each([&](int64_t id, uint32_t row, uint32_t slot) {
    RowColumnValues values = table.columns.read(row);
    const bool resident = slot != kNoSlot;
    const bool scored = table.columns.has(Column::kScore);
    const uint32_t idle_for = clock.batches_since(values.last_use);
    if (life.half_life > 0) values.score = table.half_life.decayed(values.score, idle_for);
    Known one{id, scored ? values.score : values.count, idle_for};
    one.held = (resident && group->uses.marked(slot)) ||
               group->window.has(t, row, resident ? static_cast<int64_t>(slot) : -1);
    if (at_interval) {
      if (life.needs_timestamps() && begins_now(values.timestamp, clock)) {
        begun.emplace_back(id, row);
        values.timestamp = clock.timestamp;
      }
      one.reason = overdue(life, clock, values.timestamp, one.idle);
      const bool small = row < table.small.size() && table.small[row];
      if (small && one.reason == LeaveReason::kNone) one.reason = LeaveReason::kNorm;
    }
    known.push_back(one);
  });
  begin_now(group, t, begun);
  if (at_interval) choose_share(&known, life.evict_share);
  choose_beyond(&known, life);
  return leaving(known);
}

LeavingIds choose_candidates(Table* whole, bool at_interval) {
  Table& table = *whole;
  const LifeSpec& life = table.spec().life;
  std::vector<Known> known;
  known.reserve(static_cast<size_t>(table.candidates.size()));
  table.candidates.for_each([&](int64_t id, Candidates::Values values) {
    if (at_interval && life.needs_timestamps() && begins_now(values.timestamp, table.clock)) {
      values.timestamp = table.clock.timestamp;
      table.candidates.set(table.candidates.find(id), values);
    }
    Known one{id, life.score(values.count, values.clicks), table.clock.batches_since(values.last_use)};
    if (at_interval) one.reason = overdue(life, table.clock, values.timestamp, one.idle);
    known.push_back(one);
  });
  choose_beyond(&known, life);
  return leaving(known);
}

}  // namespace

LeavingIds evictable_ids(Group* group, int32_t t, bool at_interval) {
  return choose_rows(group, t, at_interval);
}

int64_t evict_ids(Group* group, int32_t t, bool at_interval) {
  Table& table = group->tables[t];
  const LeavingIds rows = choose_rows(group, t, at_interval);
  const std::vector<int64_t> candidates = choose_candidates(&table, at_interval).ids;
  const int64_t before = table.rows();
  const int64_t removed = remove_ids(group, t, rows.ids.data(), static_cast<int64_t>(rows.ids.size()));
  for (const int64_t id : candidates) table.candidates.erase(id);
  if (!candidates.empty()) table.candidates.shrink();
  table.small.clear();
  group->stats[t].evicted += removed;
  const int64_t unbounded = std::count_if(rows.reasons.begin(), rows.reasons.end(), takes_any_number);
  if (2 * unbounded > before) group->large_evictions[t] = {unbounded, before};
  return removed;
}

}  // namespace rec_sdk
