#include "torch_npu_ext/engine/lifecycle/column_updates.h"

#include <algorithm>
#include <type_traits>

#include "torch_npu_ext/engine/base/parallel.h"

namespace rec_sdk {
namespace {

constexpr int32_t kPrefetchDistance = 48;
constexpr uint32_t kRing = 64;  // a power of two, greater than kPrefetchDistance
constexpr int32_t kPartRows = 16384;
constexpr int32_t kCacheLine = 64;

// Calls visit(record, u) for unique rows [begin, end) of a table, where `record` contains the columns of row
// u. Two prefetches run ahead of the calls, first for the row number, then for its columns. kBytes is the
// size of the columns of a row, or 0 if it is unknown at compile time.
template <bool kHashed, int32_t kBytes, class Visit>
REC_SDK_ALWAYS_INLINE void for_each_record(const Group& group, const Table& table, const int32_t* slots,
                                           int32_t begin, int32_t end, const Visit& visit) {
  const int64_t* const ids = group.slot_ids.data();
  const uint32_t* const rows = kHashed ? table.rows_of_slots() : nullptr;
  const RowColumns& columns = table.columns;
  const int32_t last_byte = columns.places().bytes() - 1;
  // If the size of the columns does not divide the size of a cache line, the columns of a row may span two
  // lines.
  constexpr bool kOnOneLine = kBytes > 0 && kCacheLine % (kBytes > 0 ? kBytes : 1) == 0;
  char* records[kRing] = {};
  const auto prefetch_row = [&](int32_t u) __attribute__((always_inline)) {
    kHashed ? prefetch(&rows[slots[u]]) : prefetch(&ids[slots[u]]);
  };
  const auto find = [&](int32_t u) __attribute__((always_inline)) {
    char* const record = columns.record(kHashed ? int64_t{rows[slots[u]]} : ids[slots[u]]);
    records[static_cast<uint32_t>(u) % kRing] = record;
    prefetch(record);
    if (!kOnOneLine) prefetch(record + last_byte);
  };
  for (int32_t u = begin; u < std::min(end, begin + 2 * kPrefetchDistance); ++u) prefetch_row(u);
  for (int32_t u = begin; u < std::min(end, begin + kPrefetchDistance); ++u) find(u);
  for (int32_t u = begin; u < end; ++u) {
    if (end - u > 2 * kPrefetchDistance) prefetch_row(u + 2 * kPrefetchDistance);
    prefetch_near(records[static_cast<uint32_t>(u + 6) % kRing]);
    char* const record = records[static_cast<uint32_t>(u) % kRing];
    if (end - u > kPrefetchDistance) find(u + kPrefetchDistance);
    visit(record, u);
  }
}

// Calls use(integral_constant) with the bits of the set of columns, except the version. The positions of the
// columns are then known at compile time.
constexpr uint32_t kVersionBit = ColumnSet{Column::kVersion}.bits();
template <uint32_t kBits = 0, class Use>
void with_columns(ColumnSet columns, const Use& use) {
  if ((columns.bits() & ~kVersionBit) == kBits) {
    use(std::integral_constant<uint32_t, kBits>());
  } else if constexpr (kBits + 1 < 1u << ColumnSet::kColumns) {
    constexpr uint32_t kNext = kBits + 1;
    with_columns<(kNext & kVersionBit) != 0 ? kNext + kVersionBit : kNext>(columns, use);
  }
}

}  // namespace

void ColumnUpdates::reserve(Group* group, const Batch& batch, const std::vector<RowRun>& runs,
                            PlanBuffers* plan) {
  parts_.clear();
  for (const RowRun& run : runs) {
    for (int32_t first = run.begin; first < run.end; first += kPartRows) {
      parts_.push_back({{run.table, first, std::min(run.end, first + kPartRows), run.shift}});
    }
  }
  ColumnSet any;
  for (size_t t = 0; t < group->tables.size(); ++t) {
    Table& table = group->tables[t];
    if (table.columns.empty()) continue;
    const int32_t count = plan->table_offsets[t + 1] - plan->table_offsets[t];
    plan->lifecycle_logs[t].columns.ensure(static_cast<size_t>(count) *
                                           table.columns.places().undone_bytes());
    if (table.columns.has(Column::kVersion)) {
      table.changes.reserve(count, table.row_bound(), group->uses.newest_version());
      any.add(Column::kVersion);
    }
    for (const Column column : {Column::kCount, Column::kClicks, Column::kTimestamp}) {
      if (table.columns.has(column)) any.add(column);
    }
  }
  const size_t numbers = static_cast<size_t>(batch.lookups);
  signals_.has_shows = any.has(Column::kCount) && batch.shows != nullptr;
  signals_.has_clicks = any.has(Column::kClicks) && batch.clicks != nullptr;
  signals_.has_timestamps = any.has(Column::kTimestamp) && batch.timestamps != nullptr;
  if (signals_.has_shows) signals_.shows.ensure(numbers);
  if (signals_.has_clicks) signals_.clicks.ensure(numbers);
  if (signals_.has_timestamps) signals_.timestamps.ensure(numbers);
  if (any.has(Column::kVersion)) changed_.ensure(static_cast<size_t>(plan->table_offsets.back()));
}

template <class Columns>
void ColumnUpdates::touch_rows(const Group& group, Part* part, PlanBuffers* plan, Columns) noexcept {
  constexpr ColumnPlaces kPlaces(ColumnSet::of_bits(Columns::value));
  constexpr int32_t kBytes = kPlaces.bytes();
  const Table& table = group.tables[part->table];
  LifecycleLog& log = plan->lifecycle_logs[part->table];
  // Members are copied to local variables, because the compiler must assume that the written bytes alias
  // members.
  const TableClock clock = table.clock;
  const ScoreRule* const score = table.spec().rules.score();
  const ChangeLog* const changes = &table.changes;
  const bool has_shows = signals_.has_shows, has_clicks = signals_.has_clicks,
             has_timestamps = signals_.has_timestamps, has_version = table.columns.has(Column::kVersion);
  const int64_t shift = part->shift;
  const uint32_t* const shows = signals_.shows.data() + shift;
  const uint32_t* const clicks = signals_.clicks.data() + shift;
  const int64_t* const timestamps = signals_.timestamps.data() + shift;
  const int32_t* const segments = plan->segment_offsets;
  const uint64_t serial = plan->serial;
  const int64_t most = log.most;
  char* const before = log.columns.data() - static_cast<int64_t>(plan->table_offsets[part->table]) * kBytes;
  int32_t* const changed = changed_.data() + part->begin;
  int32_t change_count = 0;
  const auto touch_row = [&](char* record, int32_t u) __attribute__((always_inline)) {
    if constexpr (kBytes > 0) std::memcpy(before + int64_t{u} * kBytes, record, kBytes);
    ScoreRule::Before old{0, 0, 0};
    Counts total, of_batch;
    if constexpr (kPlaces.has(Column::kCount)) {
      old.count = kPlaces.get<Column::kCount>(record);
      of_batch.shows = has_shows ? shows[u] : static_cast<uint32_t>(segments[u + 1] - segments[u]);
      total.shows = saturated_sum(old.count, of_batch.shows);
      kPlaces.set<Column::kCount>(record, total.shows);
    }
    if constexpr (kPlaces.has(Column::kLastUse)) {
      old.last_use = kPlaces.get<Column::kLastUse>(record);
      kPlaces.set<Column::kLastUse>(record, static_cast<uint32_t>(clock.batches));
    }
    if constexpr (kPlaces.has(Column::kClicks)) {
      of_batch.clicks = has_clicks ? clicks[u] : 0;
      total.clicks = saturated_sum(kPlaces.get<Column::kClicks>(record), of_batch.clicks);
      kPlaces.set<Column::kClicks>(record, total.clicks);
    }
    if constexpr (kPlaces.has(Column::kTimestamp)) {
      if (has_timestamps) {
        kPlaces.set<Column::kTimestamp>(record, timestamps[u] <= most ? timestamps[u] : clock.timestamp);
      }
    }
    if constexpr (kPlaces.has(Column::kScore)) {
      old.score = kPlaces.get<Column::kScore>(record);
      kPlaces.set<Column::kScore>(record, score->after(old, total, of_batch, clock));
    }
    if (has_version) {
      uint64_t version;
      std::memcpy(&version, record + kBytes, sizeof(version));  // the version is behind the other columns
      changed[change_count] = u;
      change_count += changes->wants(version);
      std::memcpy(record + kBytes, &serial, sizeof(serial));
    }
  };
  const int32_t begin = part->begin, end = part->end;
  const int32_t* const slots = plan->unique_slots;
  if (!table.spec().hashed) {
    for_each_record<false, 0>(group, table, slots, begin, end, touch_row);
  } else if (has_version) {
    for_each_record<true, 0>(group, table, slots, begin, end, touch_row);
  } else {
    for_each_record<true, kBytes>(group, table, slots, begin, end, touch_row);
  }
  part->changed = change_count;
}

// Sets the columns of rows that the batch admitted. The counts of these ids as candidates already include the
// batch.
void ColumnUpdates::touch_admitted(Group* group, int32_t t, const PlanBuffers& plan) noexcept {
  Table& table = group->tables[t];
  const ColumnPlaces& places = table.columns.places();
  const bool exact = table.admission->counts_each();
  const ScoreRule* const score = table.spec().rules.score();
  const std::vector<LifecycleLog::Admitted>& all = plan.lifecycle_logs[t].admitted;
  for (size_t i = 0; i < all.size(); ++i) {
    if (i + kPrefetchDistance < all.size()) prefetch(table.columns.record(all[i + kPrefetchDistance].row));
    const Candidates::Values& values = all[i].values;
    char* const record = table.columns.record(all[i].row);
    Counts total;
    // A sketch has no timestamps, and its saturated cells may be less than the count of the batch. Admission
    // by probability has no counts at all. In these cases, the batch's own count is a lower bound.
    if (places.has(Column::kCount)) {
      total.shows = exact ? values.count : std::max(places.get<Column::kCount>(record), values.count);
      places.set<Column::kCount>(record, total.shows);
    }
    if (places.has(Column::kClicks)) {
      total.clicks = exact ? values.clicks : places.get<Column::kClicks>(record);
      places.set<Column::kClicks>(record, total.clicks);
    }
    if (places.has(Column::kTimestamp) && exact) places.set<Column::kTimestamp>(record, values.timestamp);
    if (places.has(Column::kScore)) {
      places.set<Column::kScore>(record, score->after({0, 0, 0}, total, total, table.clock));
    }
  }
}

void ColumnUpdates::log_changes(Group* group, const Part& part, const PlanBuffers& plan) noexcept {
  Table& table = group->tables[part.table];
  const int32_t* const changed = changed_.data() + part.begin;
  const int64_t* const ids = group->slot_ids.data();
  for (int32_t i = 0; i < part.changed; ++i) {
    if (i + kPrefetchDistance < part.changed) {
      const int32_t ahead = plan.unique_slots[changed[i + kPrefetchDistance]];
      prefetch(&ids[ahead]);
      table.prefetch_row(static_cast<uint32_t>(ahead));
    }
    const int32_t slot = plan.unique_slots[changed[i]];
    table.changes.add(ids[slot], table.row_in(static_cast<uint32_t>(slot), ids[slot]));
  }
}

void ColumnUpdates::touch(Group* group, PlanBuffers* plan) noexcept {
  if (parts_.empty()) return;
  const auto touch_part = [&](int64_t p) noexcept {
    Part* const part = &parts_[static_cast<size_t>(p)];
    with_columns(group->tables[part->table].columns.places().columns(),
                 [&](auto columns) { touch_rows(*group, part, plan, columns); });
  };
  for (const Part& part : parts_) {
    Table& table = group->tables[part.table];
    // A table whose only column is the version needs no copies, because saves do not contain the version.
    if (table.snapshot == nullptr || table.columns.places().undone_bytes() == 0) continue;
    const int32_t* const slots = plan->unique_slots;
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
    const char* const before = plan.lifecycle_logs[t].columns.data();
    const auto put_back = [&](char* record, int32_t u) {
      std::memcpy(record, before + int64_t{u - begin} * bytes, static_cast<size_t>(bytes));
    };
    const int32_t* const slots = plan.unique_slots;
    table.spec().hashed
        ? for_each_record<true, 0>(*group, table, slots, begin, plan.table_offsets[t + 1], put_back)
        : for_each_record<false, 0>(*group, table, slots, begin, plan.table_offsets[t + 1], put_back);
  }
}

}  // namespace rec_sdk
