// Whole-table access: rare calls that are not part of a batch.
#include "torch_npu_ext/engine/api/tables.h"

#include <algorithm>
#include <shared_mutex>
#include <stdexcept>

#include "torch_npu_ext/engine/base/errors.h"
#include "torch_npu_ext/engine/lifecycle/removal.h"

namespace rec_sdk {
namespace {

Tables::RowsAndSlots sized_for(Span<int64_t> ids) {
  const auto count = static_cast<size_t>(ids.size());
  return {std::vector<int64_t>(count), std::vector<int32_t>(count)};
}

// Returns the rows and slots of ids. The row of an unknown id is -1, and so is the slot of a row outside the
// cache.
Tables::RowsAndSlots locate_ids(const Table& source, Span<int64_t> ids) {
  check_index_ids(source, ids);
  auto [rows, slots] = sized_for(ids);
  for (int64_t i = 0; i < ids.size(); ++i) {
    uint32_t row = 0, slot = 0;
    const bool known = source.locate(ids[i], &row, &slot);
    rows[i] = known ? static_cast<int64_t>(row) : -1;
    slots[i] = known ? static_cast<int32_t>(slot) : -1;
  }
  return {std::move(rows), std::move(slots)};
}

void check_ids_of_rows(const char* call, Span<int64_t> ids, Span<int64_t> rows) {
  if (ids.size() == rows.size()) return;
  throw std::invalid_argument(std::string(call) + " needs an id for every row, got " +
                              std::to_string(ids.size()) + " ids and " + std::to_string(rows.size()) +
                              " rows");
}

}  // namespace

int64_t Tables::row_count(int32_t t) {
  const auto guard = lock();
  return table(t).rows();
}

Tables::Rows Tables::rows(int32_t t) {
  constexpr int32_t kNoId = -2;  // marks a row that has no id
  const auto guard = lock_settled("listing a table");
  const Table& source = table(t);
  const size_t bound = static_cast<size_t>(source.row_bound());
  std::vector<int64_t> ids(bound), rows;
  std::vector<int32_t> slots(bound, kNoId);
  source.for_each([&](int64_t id, uint32_t row, uint32_t slot) {
    ids[row] = id;
    slots[row] = static_cast<int32_t>(slot);  // kNoSlot is -1
  });
  rows.reserve(static_cast<size_t>(source.rows()));
  for (size_t row = 0; row < bound; ++row) {
    if (slots[row] == kNoId) continue;
    ids[rows.size()] = ids[row];
    slots[rows.size()] = slots[row];
    rows.push_back(static_cast<int64_t>(row));
  }
  ids.resize(rows.size());
  slots.resize(rows.size());
  return {std::move(ids), std::move(slots), std::move(rows)};
}

void Tables::read_rows(int32_t t, Span<int64_t> ids, Span<int64_t> rows, char* records) {
  check_ids_of_rows("read_rows", ids, rows);
  const auto guard = lock_settled("reading rows");
  const Table& source = table(t);
  check_rows(source, rows);
  source.store.will_need(rows.data(), rows.size());
  for (int64_t i = 0; i < rows.size(); ++i, records += group_.layout.bytes) {
    if (!source.store.read(rows[i], records)) source.initializer.write(ids[i], records);
  }
}

Tables::RowsAndSlots Tables::find_rows(int32_t t, Span<int64_t> ids) {
  const auto guard = lock_settled("finding rows");
  return locate_ids(table(t), ids);
}

Tables::RowsAndSlots Tables::insert(int32_t t, Span<int64_t> ids) {
  const auto guard = lock_settled("adding rows");
  Table& target = table(t);
  if (!target.spec().hashed) return locate_ids(target, ids);
  auto [rows, slots] = sized_for(ids);
  const int64_t bound_before = target.row_bound();
  std::vector<std::pair<int64_t, uint32_t>> added_ids;
  try {
    for (int64_t i = 0; i < ids.size(); ++i) {
      target.reserve_ids(1);
      if (added_ids.size() == added_ids.capacity()) added_ids.reserve(2 * added_ids.size() + 64);
      bool added = false;
      const IdMap::Entry entry = target.directory().find_or_add(ids[i], IdMap::hash(ids[i]), &added);
      rows[i] = target.row_of(ids[i], entry);
      slots[i] = static_cast<int32_t>(entry.slot());
      if (!added) continue;
      added_ids.emplace_back(ids[i], entry.row());
      target.check_capacity(target.rows(), ids[i]);
    }
    target.extend_rows();
    for (const auto& [id, row] : added_ids) target.begin_row(row);
  } catch (...) {
    for (auto added = added_ids.rbegin(); added != added_ids.rend(); ++added) {
      target.directory().undo_add(added->first, added->second, bound_before);
    }
    throw;
  }
  return {std::move(rows), std::move(slots)};
}

void Tables::reserve_rows(int32_t t, Span<int64_t> rows) {
  const auto guard = lock_settled("reserving rows");
  Table& target = table(t);
  check_rows(target, rows);
  int64_t unwritten = 0;
  for (const int64_t row : rows) unwritten += !target.store.has(row);
  if (!target.store.on_disk()) {
    group_.memory.require(saturated_product(unwritten, group_.layout.bytes), target.spec().name);
  }
  for (const int64_t row : rows) target.store.map(row);
}

void Tables::write_rows(int32_t t, Span<int64_t> ids, Span<int64_t> rows, const char* records) {
  check_ids_of_rows("write_rows", ids, rows);
  reserve_rows(t, rows);
  const auto guard = lock_settled("writing rows");
  const std::unique_lock<std::shared_mutex> alone(records_mutex_);
  Table& target = table(t);
  const int64_t count = rows.size();
  target.store.will_need(rows.data(), count);
  for (int64_t i = 0, end = 0; i < count; i = end) {  // consecutive rows, as in a load, are written together
    for (end = i + 1; end < count && rows[end] == rows[end - 1] + 1; ++end) continue;
    target.store.write_run(rows[i], end - i, records + i * group_.layout.bytes, group_.layout.bytes);
  }
  if (Candidates& candidates = target.admission->candidates; candidates.size() > 0) {
    for (const int64_t id : ids) candidates.erase(id);  // an id with a row is no candidate
  }
  if (!target.columns.has(Column::kVersion)) return;
  // The rows get a newer version than the latest batch, so that a save of the changes since that batch
  // includes them.
  const uint64_t newest = group_.uses.newest_version();
  target.changes.reserve(count, target.row_bound(), newest);
  for (int64_t i = 0; i < count; ++i) {
    const uint32_t row = static_cast<uint32_t>(rows[i]);
    target.changes.add(ids[i], row, target.columns.exchange_version(row, newest));
  }
}

int64_t Tables::remove(int32_t t, Span<int64_t> ids, bool candidates) {
  const auto guard = lock_settled("removing rows");
  const std::unique_lock<std::shared_mutex> alone(records_mutex_);
  table(t);  // throws std::out_of_range
  return remove_ids(&group_, t, ids.data(), ids.size(), candidates);
}

void Tables::clear(int32_t t) {
  const auto guard = lock_settled("clearing a table");
  Table& target = table(t);
  group_.uses.mark_held();
  if (group_.uses.marked_count(t) > 0) {
    throw std::runtime_error("table '" + target.spec().name + "' cannot be cleared while " +
                             std::to_string(group_.uses.marked_count(t)) +
                             " of its rows are used by batches in flight");
  }
  const std::unique_lock<std::shared_mutex> alone(records_mutex_);
  group_.window.drop_table(t);
  group_.window.drop_slots(target.first_slot(), target.end_slot());
  target.clear();
  target.removals.removed.clear();
  shrink_removals(&target.removals.removed);
  target.removals.complete_after = group_.uses.newest_version();
  target.changes.clear(group_.uses.newest_version());
  for (int64_t slot = target.first_slot(); slot < target.end_slot(); ++slot) group_.uses.forget(slot);
}

void Tables::initial_records(int32_t t, Span<int64_t> ids, char* records) {
  const auto guard = lock();
  const Table& source = table(t);
  for (const int64_t id : ids) {
    source.initializer.write(id, records);
    records += group_.layout.bytes;
  }
}

std::pair<int32_t, int32_t> Tables::range(int32_t t) {
  if (t == kAllTables) return {0, table_count()};
  table(t);
  return {t, t + 1};
}

Tables::Memory Tables::memory(int32_t t) {
  const auto guard = lock();
  const auto [first, end] = range(t);
  Memory memory{};
  for (int32_t k = first; k < end; ++k) {
    const Table& table = group_.tables[k];
    memory.index_bytes += table.index_bytes();
    memory.store_bytes += table.store.committed_bytes();
    memory.disk_bytes += table.store.disk_bytes();
    memory.column_bytes += table.column_bytes();
    memory.rows += table.rows();
    memory.candidates += table.admission->candidates.size();
    memory.candidate_bytes += table.admission->bytes();
  }
  return memory;
}

void Tables::set_memory_limit(int64_t bytes) {
  const auto guard = lock();
  group_.memory.set_limit(bytes);
}

Stats Tables::stats(int32_t t) {
  const auto guard = lock();
  const auto [first, end] = range(t);
  Stats total = group_.stats[first];
  for (int32_t k = first + 1; k < end; ++k) {
    const Stats& stats = group_.stats[k];
    for_each_sum([&](const char*, auto member) { total.*member += stats.*member; });
    total.largest_batch = std::max(total.largest_batch, stats.largest_batch);
  }
  return total;
}

int64_t Tables::pinned(int32_t t) {
  const auto guard = lock();
  const auto [first, end] = range(t);
  group_.uses.mark_held();
  int64_t pinned = 0;
  for (int32_t k = first; k < end; ++k) pinned += group_.uses.marked_count(k);
  return pinned;
}

void Tables::reset_stats() {
  const auto guard = lock();
  group_.stats.assign(group_.tables.size(), Stats());
}

Tables::BoundsWarnings Tables::take_bounds_warnings() {
  const auto guard = lock();
  BoundsWarnings warnings;
  for (const BoundsError& error : group_.bounds_warnings) {
    warnings.emplace_back(group_.tables[error.table].spec().name, error.count, error.example);
  }
  group_.bounds_warnings.clear();
  return warnings;
}

}  // namespace rec_sdk
