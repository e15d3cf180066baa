#include "torch_npu_ext/engine/life/column_updates.h"

#include <algorithm>

#include "torch_npu_ext/engine/base/parallel.h"
#include "torch_npu_ext/engine/life/half_life.h"

namespace rec_sdk {
namespace {

constexpr int32_t kPrefetchDistance = 24;
constexpr int32_t kRing = 32;  // no less; a power of two

uint32_t row_at(const Group& group, const Table& table, int32_t slot) {
  return table.row_in(static_cast<uint32_t>(slot), group.slot_ids[slot]);
}

class ColumnPrefetch {
 public:
  explicit ColumnPrefetch(const RowColumns& columns)
      : columns_(columns),
        count_(columns.has(Column::kCount)),
        others_(columns.has(Column::kLastUse) || columns.has(Column::kVersion) ||
                columns.has(Column::kScore) || columns.has(Column::kClicks) ||
                columns.has(Column::kTimestamp)) {}
  void operator()(uint32_t row) const {
    if (count_) prefetch_near(&columns_.count(row));
    if (others_) columns_.prefetch(row);
  }

 private:
  const RowColumns& columns_;
  bool count_, others_;
};

// visit(row, u) of the unique rows of a table. Rows come from one pass of prefetches, columns from the next.
template <class Visit>
void for_each_row(const Group& group, int32_t t, const PlanBuffers& plan, const Visit& visit) {
  const Table& table = group.tables[t];
  const bool hashed = table.spec().hashed;
  const int32_t begin = plan.table_offsets[t], end = plan.table_offsets[t + 1];
  const int32_t* const slots = plan.unique_slots;
  const int64_t* const ids = group.slot_ids.data();
  uint32_t rows[kRing];
  const ColumnPrefetch prefetch_columns(table.columns);
  for (int32_t u = begin; u < end + 2 * kPrefetchDistance; ++u) {
    if (u < end) hashed ? table.prefetch_row(static_cast<uint32_t>(slots[u])) : prefetch(&ids[slots[u]]);
    const int32_t found = u - kPrefetchDistance, visited = u - 2 * kPrefetchDistance;
    if (found >= begin && found < end) {
      const uint32_t slot = static_cast<uint32_t>(slots[found]);
      const uint32_t row = hashed ? table.row_in(slot, 0) : static_cast<uint32_t>(ids[slot]);
      rows[found % kRing] = row;
      prefetch_columns(row);
    }
    if (visited >= begin) visit(rows[visited % kRing], visited);
  }
}

// Numbers that only lookups have, in their order: the last timestamp of an id is its own.
void touch_by_lookups(const Group& group, int32_t t, const Batch& batch, const PlanBuffers& plan) {
  const Table& table = group.tables[t];
  const RowColumns& columns = table.columns;
  const bool counts = columns.has(Column::kCount) && batch.shows != nullptr;
  const bool clicks = columns.has(Column::kClicks) && batch.clicks != nullptr;
  const bool times = columns.has(Column::kTimestamp) && batch.timestamps != nullptr;
  if (!counts && !clicks && !times) return;
  const int32_t nobody = table.spec().default_row ? static_cast<int32_t>(table.default_slot()) : -1;
  for (const Batch::Piece& piece : batch.pieces) {
    if (group.features[piece.feature].table != t) continue;
    for (int64_t i = piece.begin; i < piece.end; ++i) {
      if (i + kPrefetchDistance < piece.end && plan.slots[i + kPrefetchDistance] != nobody) {
        table.prefetch_row(static_cast<uint32_t>(plan.slots[i + kPrefetchDistance]));
      }
      if (plan.slots[i] == nobody) continue;
      const uint32_t row = row_at(group, table, plan.slots[i]);
      const int64_t source = piece.source + i - piece.begin;
      if (counts) columns.count(row) = saturated_sum(columns.count(row), batch.shows_of(source));
      if (clicks) columns.clicks(row) = saturated_sum(columns.clicks(row), batch.clicks_of(source));
      if (times) columns.timestamp(row) = plan.life[t].believed(batch.timestamps[source], table.clock);
    }
  }
}

// A row's score is of the moment of its last batch: the score then, and those since its first as far as they
// are left.
void touch_decaying(const Group& group, int32_t t, const PlanBuffers& plan) {
  const Table& table = group.tables[t];
  const RowColumns& columns = table.columns;
  const LifeSpec& life = table.spec().life;
  const bool clicks = columns.has(Column::kClicks);
  const uint64_t* const all_before = plan.life[t].columns.data();
  for_each_row(group, t, plan, [&](uint32_t row, int32_t u) {
    const uint64_t* const before = all_before + (u - plan.table_offsets[t]) * columns.words();
    const uint32_t count = static_cast<uint32_t>(before[0] >> 32),
                   last_use = static_cast<uint32_t>(before[0]);
    const uint32_t idle_for = table.clock.batches_since(last_use);
    const double left = count == 0 ? 0 : HalfLife::decayed(columns.score(row), idle_for, life.half_life);
    const uint32_t clicked = clicks ? columns.clicks(row) - static_cast<uint32_t>(before[1]) : 0;
    columns.score(row) = left + life.score(columns.count(row) - count, clicked);
  });
}

// A row's first score is not decayed.
void touch_scores(const Group& group, int32_t t, const PlanBuffers& plan) {
  const Table& table = group.tables[t];
  const RowColumns& columns = table.columns;
  if (!columns.has(Column::kScore)) return;
  const LifeSpec& life = table.spec().life;
  if (life.half_life > 0) return touch_decaying(group, t, plan);
  const uint64_t* const before = plan.life[t].columns.data();
  for_each_row(group, t, plan, [&](uint32_t row, int32_t u) {
    const uint64_t count_before = before[(u - plan.table_offsets[t]) * columns.words()] >> 32;
    const uint32_t clicks = columns.has(Column::kClicks) ? columns.clicks(row) : 0;
    const double score = life.score(columns.count(row), clicks);
    columns.score(row) = count_before == 0 ? score : (columns.score(row) + score) * life.decay;
  });
}

void touch_table(Group* group, int32_t t, const Batch& batch, PlanBuffers* plan) {
  Table& table = group->tables[t];
  RowColumns& columns = table.columns;
  LifeLog& log = plan->life[t];
  // Copies: what is written could be these, for all that the compiler knows.
  const bool has_count = columns.has(Column::kCount), has_last_use = columns.has(Column::kLastUse);
  const bool has_version = columns.has(Column::kVersion), by_segment = batch.shows == nullptr;
  const int64_t words = columns.words();
  const bool packed_alone = words == 1 && (has_count || has_last_use);
  const int32_t first = plan->table_offsets[t];
  const int32_t* const segments = plan->segment_offsets;
  const uint32_t now = static_cast<uint32_t>(table.clock.batches);
  const uint64_t serial = plan->serial;
  const int32_t* const slots = plan->unique_slots;
  const int64_t* const ids = group->slot_ids.data();
  ChangeLog& changes = table.changes;
  if (table.snapshot != nullptr && words > 0) {  // saves have no versions
    for_each_row(*group, t, *plan, [&](uint32_t row, int32_t) { table.snapshot->keep(row, columns); });
  }
  uint64_t* const before = log.columns.data();
  for_each_row(*group, t, *plan, [&](uint32_t row, int32_t u) {
    if (words > 0 && !packed_alone) columns.save(row, before + (u - first) * words);
    uint32_t count_before = 0, last_use_before = 0;
    if (has_count) {
      uint32_t& count = columns.count(row);
      count_before = count;
      if (by_segment) count = saturated_sum(count, static_cast<uint32_t>(segments[u + 1] - segments[u]));
    }
    if (has_last_use) {
      uint32_t& last_use = columns.last_use(row);
      last_use_before = last_use;
      last_use = now;
    }
    if (packed_alone) before[u - first] = RowColumns::packed(count_before, last_use_before);
    if (has_version) {
      uint64_t& version = columns.version(row);
      changes.add(ids[slots[u]], version);
      version = serial;
    }
  });
  touch_by_lookups(*group, t, batch, *plan);
  const bool whole = table.has_candidates();
  for (const LifeLog::Counted& admitted : log.admitted) {  // the batch is in what they have
    const Candidates::Values& values = admitted.values;
    const uint32_t row = table.row_of(admitted.id, table.map().find(admitted.id, IdMap::hash(admitted.id)));
    // A sketch has no timestamps, and a cell that is full may say less than the batch; chance counts nothing.
    if (columns.has(Column::kCount)) {
      columns.count(row) = whole ? values.count : std::max(columns.count(row), values.count);
    }
    if (columns.has(Column::kClicks) && whole) columns.clicks(row) = values.clicks;
    if (columns.has(Column::kTimestamp) && whole) {
      columns.timestamp(row) = values.timestamp;
    }
  }
  touch_scores(*group, t, *plan);
}

}  // namespace

void reserve_columns(Group* group, PlanBuffers* plan) {
  for (size_t t = 0; t < group->tables.size(); ++t) {
    Table& table = group->tables[t];
    const int64_t rows = plan->table_offsets[t + 1] - plan->table_offsets[t];
    plan->life[t].columns.ensure(static_cast<size_t>(rows * table.columns.words()));
    if (table.columns.has(Column::kVersion)) {
      table.changes.reserve(rows, table.row_bound(), group->uses.newest_version());
    }
  }
}

void touch_columns(Group* group, const Batch& batch, PlanBuffers* plan) noexcept {
  for_each_part(static_cast<int64_t>(group->tables.size()), plan->lookups, [&](int64_t t) noexcept {
    Table& table = group->tables[t];
    if (!table.columns.empty()) touch_table(group, static_cast<int32_t>(t), batch, plan);
  });
}

void untouch_columns(Group* group, const PlanBuffers& plan) noexcept {
  for (int32_t t = 0; t < static_cast<int32_t>(group->tables.size()); ++t) {
    RowColumns& columns = group->tables[t].columns;
    if (columns.words() == 0) continue;
    const uint64_t* const before = plan.life[t].columns.data();
    for_each_row(*group, t, plan, [&](uint32_t row, int32_t u) {
      columns.restore(row, before + (u - plan.table_offsets[t]) * columns.words());
    });
  }
}

}  // namespace rec_sdk
