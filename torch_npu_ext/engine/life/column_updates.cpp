#include "torch_npu_ext/engine/life/column_updates.h"

#include <algorithm>
#include <type_traits>

#include "torch_npu_ext/engine/base/parallel.h"

namespace rec_sdk {
namespace {

constexpr int32_t kPrefetchDistance = 24;
constexpr int32_t kRing = 32;  // no less; a power of two
constexpr int32_t kPartRows = 16384;

// visit(record, u) of unique rows [begin, end) of a table. Rows come from one pass of prefetches, records
// from the next.
template <class Visit>
REC_SDK_ALWAYS_INLINE void for_each_record(const Group& group, const Table& table, const int32_t* slots,
                                           int32_t begin, int32_t end, const Visit& visit) {
  const bool hashed = table.spec().hashed;
  const int64_t* const ids = group.slot_ids.data();
  const int32_t last_byte = table.columns.places().bytes() - 1;
  char* records[kRing];
  for (int32_t u = begin; u < end + 2 * kPrefetchDistance; ++u) {
    if (u < end) hashed ? table.prefetch_row(static_cast<uint32_t>(slots[u])) : prefetch(&ids[slots[u]]);
    const int32_t found = u - kPrefetchDistance, visited = u - 2 * kPrefetchDistance;
    if (found >= begin && found < end) {
      const uint32_t slot = static_cast<uint32_t>(slots[found]);
      char* const record = table.columns.record(hashed ? table.row_in(slot, 0) : ids[slot]);
      records[found % kRing] = record;
      prefetch_near(record);
      prefetch_near(record + last_byte);
    }
    if (visited >= begin) visit(records[visited % kRing], visited);
  }
}

// Calls use(std::integral_constant of `bytes`), a multiple of 4 up to 28.
template <int32_t kBytes = 0, class Use>
void with_constant(int32_t bytes, const Use& use) {
  if (bytes == kBytes) {
    use(std::integral_constant<int32_t, kBytes>());
  } else if constexpr (kBytes < 28) {
    with_constant<kBytes + 4>(bytes, use);
  }
}

// A row as it was before the batch; a `count` of 0: no batch has had it.
struct Score {
  double score;
  uint32_t count, last_use, clicks;
};

// A score that decays with time is of the moment of the row's last batch: the score then, and those since its
// first as far as they are left. Another one is not decayed the first time.
double new_score(const Table& table, const Score& before, uint32_t count, uint32_t clicks) {
  const LifeSpec& life = table.spec().life;
  if (life.half_life > 0) {
    const uint32_t idle_for = table.clock.batches_since(before.last_use);
    const double left = before.count == 0 ? 0 : table.half_life.decayed(before.score, idle_for);
    return left + life.score(count - before.count, clicks - before.clicks);
  }
  const double score = life.score(count, clicks);
  return before.count == 0 ? score : (before.score + score) * life.decay;
}

}  // namespace

void ColumnUpdates::reserve(Group* group, const Batch& batch, int64_t shares, PlanBuffers* plan) {
  parts_.clear();
  ColumnSet any;
  for (size_t t = 0; t < group->tables.size(); ++t) {
    Table& table = group->tables[t];
    if (table.columns.empty()) continue;
    const int32_t begin = plan->table_offsets[t], end = plan->table_offsets[t + 1];
    for (int32_t first = begin; first < end; first += kPartRows) {
      parts_.push_back({static_cast<int32_t>(t), first, std::min(end, first + kPartRows)});
    }
    plan->life[t].columns.ensure(static_cast<size_t>(end - begin) * table.columns.places().undone_bytes());
    if (table.columns.has(Column::kVersion)) {
      table.changes.reserve(end - begin, table.row_bound(), group->uses.newest_version());
      any.add(Column::kVersion);
    }
    for (const Column column : {Column::kCount, Column::kClicks, Column::kTimestamp}) {
      if (table.columns.has(column)) any.add(column);
    }
  }
  const size_t places = static_cast<size_t>(plan->table_offsets.back() + shares);
  facts_.has_shows = any.has(Column::kCount) && batch.shows != nullptr;
  facts_.has_clicks = any.has(Column::kClicks) && batch.clicks != nullptr;
  facts_.has_timestamps = any.has(Column::kTimestamp) && batch.timestamps != nullptr;
  if (facts_.has_shows) facts_.shows.ensure(places);
  if (facts_.has_clicks) facts_.clicks.ensure(places);
  if (facts_.has_timestamps) facts_.timestamps.ensure(places);
  if (any.has(Column::kVersion)) changed_.ensure(places);
}

template <class Bytes>
void ColumnUpdates::touch_rows(const Group& group, Part* part, PlanBuffers* plan, Bytes) noexcept {
  const Table& table = group.tables[part->table];
  LifeLog& log = plan->life[part->table];
  // Copies: what is written could be these, for all that the compiler knows.
  const ColumnPlaces places = table.columns.places();
  const LifeClock clock = table.clock;
  const ChangeLog* const changes = &table.changes;
  const bool has_shows = facts_.has_shows, has_clicks = facts_.has_clicks,
             has_timestamps = facts_.has_timestamps;
  const uint32_t* const shows = facts_.shows.data();
  const uint32_t* const clicks = facts_.clicks.data();
  const int64_t* const timestamps = facts_.timestamps.data();
  const int32_t* const segments = plan->segment_offsets;
  const uint64_t serial = plan->serial;
  const int64_t most = log.most;
  char* const before =
      log.columns.data() - static_cast<int64_t>(plan->table_offsets[part->table]) * Bytes::value;
  int32_t* const changed = changed_.data() + part->begin;
  int32_t changes_found = 0;
  for_each_record(group, table, plan->unique_slots, part->begin, part->end, [&](char* record, int32_t u) {
    if constexpr (Bytes::value > 0) std::memcpy(before + int64_t{u} * Bytes::value, record, Bytes::value);
    Score old{0, 0, 0, 0};
    uint32_t count = 0, clicked = 0;
    if (places.has(Column::kCount)) {
      old.count = places.get<Column::kCount>(record);
      count = saturated_sum(old.count,
                            has_shows ? shows[u] : static_cast<uint32_t>(segments[u + 1] - segments[u]));
      places.set<Column::kCount>(record, count);
    }
    if (places.has(Column::kLastUse)) {
      old.last_use = places.get<Column::kLastUse>(record);
      places.set<Column::kLastUse>(record, static_cast<uint32_t>(clock.batches));
    }
    if (places.has(Column::kClicks)) {
      old.clicks = clicked = places.get<Column::kClicks>(record);
      if (has_clicks) places.set<Column::kClicks>(record, clicked = saturated_sum(clicked, clicks[u]));
    }
    if (has_timestamps && places.has(Column::kTimestamp)) {
      places.set<Column::kTimestamp>(record, timestamps[u] <= most ? timestamps[u] : clock.timestamp);
    }
    if (places.has(Column::kScore)) {
      old.score = places.get<Column::kScore>(record);
      places.set<Column::kScore>(record, new_score(table, old, count, clicked));
    }
    if (places.has(Column::kVersion)) {
      changed[changes_found] = u;
      changes_found += changes->wants(places.get<Column::kVersion>(record));
      places.set<Column::kVersion>(record, serial);
    }
  });
  part->changed = changes_found;
}

// Rows that the batch admitted: it is in what they have.
void ColumnUpdates::touch_admitted(Group* group, int32_t t, const PlanBuffers& plan) noexcept {
  Table& table = group->tables[t];
  const ColumnPlaces& places = table.columns.places();
  const bool whole = table.has_candidates();
  for (const LifeLog::Counted& admitted : plan.life[t].admitted) {
    const Candidates::Values& values = admitted.values;
    const uint32_t row = table.row_of(admitted.id, table.map().find(admitted.id, IdMap::hash(admitted.id)));
    char* const record = table.columns.record(row);
    uint32_t count = 0, clicks = 0;
    // A sketch has no timestamps, and a cell that is full may say less than the batch; chance counts nothing.
    if (places.has(Column::kCount)) {
      count = whole ? values.count : std::max(places.get<Column::kCount>(record), values.count);
      places.set<Column::kCount>(record, count);
    }
    if (places.has(Column::kClicks)) {
      clicks = whole ? values.clicks : places.get<Column::kClicks>(record);
      places.set<Column::kClicks>(record, clicks);
    }
    if (places.has(Column::kTimestamp) && whole) places.set<Column::kTimestamp>(record, values.timestamp);
    if (places.has(Column::kScore)) {
      places.set<Column::kScore>(record, new_score(table, {0, 0, 0, 0}, count, clicks));
    }
  }
}

void ColumnUpdates::log_changes(Group* group, const Part& part, const PlanBuffers& plan) noexcept {
  ChangeLog& changes = group->tables[part.table].changes;
  const int32_t* const changed = changed_.data() + part.begin;
  const int64_t* const ids = group->slot_ids.data();
  for (int32_t i = 0; i < part.changed; ++i) {
    if (i + kPrefetchDistance < part.changed) {
      prefetch(&ids[plan.unique_slots[changed[i + kPrefetchDistance]]]);
    }
    changes.add(ids[plan.unique_slots[changed[i]]]);
  }
}

void ColumnUpdates::touch(Group* group, PlanBuffers* plan) noexcept {
  if (parts_.empty()) return;
  const auto touch_part = [&](int64_t p) noexcept {
    Part* const part = &parts_[static_cast<size_t>(p)];
    with_constant(group->tables[part->table].columns.places().undone_bytes(),
                  [&](auto undone) { touch_rows(*group, part, plan, undone); });
  };
  for (const Part& part : parts_) {
    Table& table = group->tables[part.table];
    if (table.snapshot == nullptr || table.columns.places().undone_bytes() == 0) continue;
    const int32_t* const slots = plan->unique_slots;  // saves have no versions
    for (int32_t u = part.begin; u < part.end; ++u) {
      const uint32_t slot = static_cast<uint32_t>(slots[u]);
      table.snapshot->keep(table.row_in(slot, group->slot_ids[slot]), table.columns);
    }
  }
  for_each_part(static_cast<int64_t>(parts_.size()), plan->lookups, touch_part);
  for (const Part& part : parts_) log_changes(group, part, *plan);
  for (size_t t = 0; t < group->tables.size(); ++t) {
    if (!group->tables[t].columns.empty()) touch_admitted(group, static_cast<int32_t>(t), *plan);
  }
}

void ColumnUpdates::undo(Group* group, const PlanBuffers& plan) noexcept {
  for (size_t t = 0; t < group->tables.size(); ++t) {
    const Table& table = group->tables[t];
    const int32_t bytes = table.columns.places().undone_bytes(), begin = plan.table_offsets[t];
    if (bytes == 0) continue;
    const char* const before = plan.life[t].columns.data();
    for_each_record(*group, table, plan.unique_slots, begin, plan.table_offsets[t + 1],
                    [&](char* record, int32_t u) {
                      std::memcpy(record, before + int64_t{u - begin} * bytes, static_cast<size_t>(bytes));
                    });
  }
}

}  // namespace rec_sdk
