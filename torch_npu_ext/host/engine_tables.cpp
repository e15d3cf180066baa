// The engine's calls on whole tables and on pending gradients: rare, and never on the path of a batch.
#include <algorithm>
#include <cstring>
#include <stdexcept>

#include "torch_npu_ext/host/engine.h"
#include "torch_npu_ext/host/errors.h"
#include "torch_npu_ext/host/removal.h"

namespace rec_sdk {
namespace {

void check_range(const char* what, int64_t begin, int64_t end, int64_t size) {
  if (begin >= 0 && begin <= end && end <= size) return;
  throw std::out_of_range(std::string(what) + " [" + std::to_string(begin) + ", " + std::to_string(end) +
                          ") are not within [0, " + std::to_string(size) + ")");
}

void check_rows(const Table& table, const int64_t* rows, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    if (rows[i] >= 0 && rows[i] < table.row_bound()) continue;
    throw std::out_of_range("table '" + table.spec().name + "': row " + std::to_string(rows[i]) +
                            " is not one of its rows, which are below " + std::to_string(table.row_bound()));
  }
}

}  // namespace

Table& Engine::table(int32_t t) {
  if (t < 0 || t >= table_count()) {
    throw std::out_of_range("table " + std::to_string(t) + " is not one of the " +
                            std::to_string(table_count()) + " tables of the group");
  }
  return group_.tables[t];
}

void Engine::pending_slots(std::vector<int32_t>* slots, std::vector<int32_t>* table_offsets) {
  const auto guard = lock();
  slots->assign(group_.pending_slots.begin(), group_.pending_slots.end());
  const auto taken_back = [this](int32_t slot) { return group_.pending_flags[slot] == 0; };
  slots->erase(std::remove_if(slots->begin(), slots->end(), taken_back), slots->end());
  std::sort(slots->begin(), slots->end());
  slots->erase(std::unique(slots->begin(), slots->end()), slots->end());
  table_offsets->assign(1, 0);
  for (const Table& table : group_.tables) {
    const auto end = std::lower_bound(slots->begin(), slots->end(), table.end_slot());
    table_offsets->push_back(static_cast<int32_t>(end - slots->begin()));
  }
}

void Engine::pending_away(std::vector<int64_t>* rows, std::vector<int32_t>* table_offsets) {
  const auto guard = lock();
  const size_t tables = group_.tables.size();
  rows->clear();
  table_offsets->assign(tables + 1, 0);
  for (const PendingSums::Away& away : group_.pending.sorted()) {
    rows->push_back(away.row());
    ++(*table_offsets)[away.table() + 1];
  }
  for (size_t t = 0; t < tables; ++t) (*table_offsets)[t + 1] += (*table_offsets)[t];
}

void Engine::read_away(int64_t begin, int64_t end, char* records, float* sums) {
  const auto guard = lock();
  check_range("rows with pending gradients", begin, end, group_.pending.size());
  const size_t record = static_cast<size_t>(group_.layout.bytes);
  const int64_t width = 2 * group_.layout.dim;
  for (int64_t i = begin; i < end; ++i, records += record, sums += width) {
    const PendingSums::Away& away = group_.pending.sorted()[i];
    if (!group_.tables[away.table()].store.has(away.row())) {
      throw std::runtime_error("a row with pending gradients is on its way out: write_back its plan first");
    }
    std::memcpy(records, group_.tables[away.table()].store.read(away.row()), record);
    std::memcpy(sums, group_.pending.data(away.place), static_cast<size_t>(width) * sizeof(float));
  }
}

void Engine::clear_pending() {
  const auto guard = lock();
  group_.pending.clear();
  for (const int32_t slot : group_.pending_slots) group_.set_pending(slot, false);
  group_.pending_slots.clear();
}

int64_t Engine::row_count(int32_t t) {
  const auto guard = lock();
  return table(t).rows();
}

void Engine::table_rows(int32_t t, std::vector<int64_t>* ids, std::vector<int32_t>* slots,
                        std::vector<int64_t>* rows) {
  constexpr int32_t kNobody = -2;  // the slot of a row that has no id
  const auto guard = lock();
  const Table& source = table(t);
  const size_t bound = static_cast<size_t>(source.row_bound());
  ids->resize(bound);
  slots->assign(bound, kNobody);
  source.for_each([&](int64_t id, uint32_t row, uint32_t slot) {
    (*ids)[row] = id;
    (*slots)[row] = static_cast<int32_t>(slot);  // kNoSlot is -1
  });
  if (rows != nullptr) rows->clear();
  size_t known = 0;
  for (size_t row = 0; row < bound; ++row) {
    if ((*slots)[row] == kNobody) continue;
    (*ids)[known] = (*ids)[row];
    (*slots)[known++] = (*slots)[row];
    if (rows != nullptr) rows->push_back(static_cast<int64_t>(row));
  }
  ids->resize(known);
  slots->resize(known);
}

void Engine::read_rows(int32_t t, const int64_t* ids, const int64_t* rows, int64_t count, char* records) {
  const auto guard = lock();
  const Table& source = table(t);
  check_rows(source, rows, count);
  for (int64_t i = 0; i < count; ++i, records += group_.layout.bytes) {
    const int64_t row = rows[i];
    if (source.store.has(row)) {
      std::memcpy(records, source.store.read(row), static_cast<size_t>(group_.layout.bytes));
    } else {
      source.initializer.write(ids[i], records);
    }
  }
}

std::vector<int64_t> Engine::kept_rows(int32_t t) {
  const auto guard = lock();
  const Table& source = table(t);
  std::vector<int64_t> rows;
  source.for_each([&](int64_t, uint32_t row, uint32_t slot) {
    if (slot != kNoSlot || source.store.has(row)) rows.push_back(row);
  });
  std::sort(rows.begin(), rows.end());
  return rows;
}

void Engine::insert(int32_t t, const int64_t* ids, int64_t count, int64_t* rows, int32_t* slots) {
  const auto guard = lock();
  Table& target = table(t);
  if (target.spec().hashed) {
    insert_ids(&target, ids, count, rows, slots);
    return;
  }
  check_index_ids(target, ids, count);
  for (int64_t i = 0; i < count; ++i) {
    rows[i] = ids[i];
    slots[i] = static_cast<int32_t>(~target.row_slots()[ids[i]]);
  }
}

void Engine::insert_ids(Table* target, const int64_t* ids, int64_t count, int64_t* rows, int32_t* slots) {
  const int64_t bound_before = target->row_bound();
  std::vector<std::pair<int64_t, uint32_t>> added_ids;
  try {
    for (int64_t i = 0; i < count; ++i) {
      target->reserve_ids(1);
      if (added_ids.size() == added_ids.capacity()) added_ids.reserve(2 * added_ids.size() + 64);
      bool added = false;
      const IdMap::Entry entry = target->directory().find_or_add(ids[i], IdMap::hash(ids[i]), &added);
      rows[i] = target->row_of(ids[i], entry);
      slots[i] = static_cast<int32_t>(entry.slot());
      if (!added) continue;
      added_ids.emplace_back(ids[i], entry.row());
      target->check_capacity(target->rows(), ids[i]);
    }
    target->extend_rows();
  } catch (...) {
    for (auto added = added_ids.rbegin(); added != added_ids.rend(); ++added) {
      target->directory().undo_add(added->first, added->second, bound_before);
    }
    throw;
  }
}

void Engine::write_rows(int32_t t, const int64_t* rows, int64_t count, const char* records) {
  const auto guard = lock();
  Table& target = table(t);
  check_rows(target, rows, count);
  int64_t fresh = 0;
  for (int64_t i = 0; i < count; ++i) fresh += !target.store.has(rows[i]);
  group_.memory.require(saturated_product(fresh, group_.layout.bytes), target.spec().name);
  for (int64_t i = 0; i < count; ++i) target.store.map(rows[i]);
  for (int64_t i = 0; i < count; ++i) target.store.write(rows[i], records + i * group_.layout.bytes);
  if (!target.columns.has(Column::kVersion)) return;
  // Whoever saves what changed since the latest batch has to find these rows as well.
  for (int64_t i = 0; i < count; ++i) target.columns.version(rows[i]) = group_.uses.serial() + 1;
}

void Engine::read_columns(int32_t t, const int64_t* rows, int64_t count, RowColumnValues* values) {
  const auto guard = lock();
  const Table& source = table(t);
  check_rows(source, rows, count);
  for (int64_t i = 0; i < count; ++i) values[i] = source.columns.read(rows[i]);
}

int64_t Engine::remove(int32_t t, const int64_t* ids, int64_t count) {
  const auto guard = lock();
  table(t);  // checked
  return remove_ids(&group_, t, ids, count);
}

void Engine::clear_table(int32_t t) {
  const auto guard = lock();
  Table& target = table(t);
  group_.uses.mark_held();
  if (group_.uses.marked_count(t) > 0) {
    throw std::runtime_error("table '" + target.spec().name + "' cannot be cleared while " +
                             std::to_string(group_.uses.marked_count(t)) +
                             " of its rows are used by batches in flight");
  }
  group_.pending.drop_table(t);
  target.clear();
  for (int64_t slot = target.first_slot(); slot < target.end_slot(); ++slot) {
    group_.set_pending(slot, false);
    group_.uses.forget(slot);
  }
}

void Engine::initial_records(int32_t t, const int64_t* ids, int64_t count, char* records) {
  const auto guard = lock();
  const Table& source = table(t);
  for (int64_t i = 0; i < count; ++i) source.initializer.write(ids[i], records + i * group_.layout.bytes);
}

}  // namespace rec_sdk
