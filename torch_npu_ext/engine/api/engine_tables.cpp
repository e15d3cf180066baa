// The engine's calls on whole tables: rare, and never on the path of a batch.
#include <algorithm>
#include <cstring>
#include <shared_mutex>
#include <stdexcept>

#include "torch_npu_ext/engine/api/engine.h"
#include "torch_npu_ext/engine/base/errors.h"
#include "torch_npu_ext/engine/base/radix_sort.h"
#include "torch_npu_ext/engine/life/removal.h"

namespace rec_sdk {
void Engine::check_rows(const Table& table, const int64_t* rows, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    if (rows[i] >= 0 && rows[i] < table.row_bound()) continue;
    throw std::out_of_range("table '" + table.spec().name + "': row " + std::to_string(rows[i]) +
                            " is not one of its rows, which are below " + std::to_string(table.row_bound()));
  }
}

Table& Engine::table(int32_t t) {
  if (t < 0 || t >= table_count()) {
    throw std::out_of_range("table " + std::to_string(t) + " is not one of the " +
                            std::to_string(table_count()) + " tables of the group");
  }
  return group_.tables[t];
}

int64_t Engine::row_count(int32_t t) {
  const auto guard = lock();
  return table(t).rows();
}

void Engine::table_rows(int32_t t, std::vector<int64_t>* ids, std::vector<int32_t>* slots,
                        std::vector<int64_t>* rows) {
  constexpr int32_t kNobody = -2;  // the slot of a row that has no id
  const auto guard = lock_settled("listing a table");
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
  const auto guard = lock_settled("reading rows");
  const Table& source = table(t);
  check_rows(source, rows, count);
  source.store.will_need(rows, count);
  for (int64_t i = 0; i < count; ++i, records += group_.layout.bytes) {
    if (!source.store.read(rows[i], records)) source.initializer.write(ids[i], records);
  }
}

namespace {

std::vector<int64_t> sorted_by_row(std::vector<std::pair<uint32_t, int64_t>> found) {
  radix_sort(&found, [](const auto& row_and_id) -> uint64_t { return row_and_id.first; });
  std::vector<int64_t> ids;
  ids.reserve(found.size());
  for (const auto& row_and_id : found) ids.push_back(row_and_id.second);
  return ids;
}

// Ids of the rows that `wanted(id, row, slot)` wants, by ascending row.
template <class Wanted>
std::vector<int64_t> ids_by_row(const Table& table, const Wanted& wanted) {
  std::vector<std::pair<uint32_t, int64_t>> found;
  table.for_each([&](int64_t id, uint32_t row, uint32_t slot) {
    if (wanted(id, row, slot)) found.emplace_back(row, id);
  });
  return sorted_by_row(std::move(found));
}

// These ids alone, as far as the table knows them.
template <class Wanted>
std::vector<int64_t> ids_by_row(const Table& table, const std::vector<int64_t>& ids, const Wanted& wanted) {
  constexpr size_t kAhead = 16;
  std::vector<std::pair<uint32_t, int64_t>> found;
  uint32_t row = 0, slot = 0;
  for (size_t i = 0; i < ids.size(); ++i) {
    if (i + kAhead < ids.size()) table.prefetch_slot(ids[i + kAhead]);
    if (table.locate(ids[i], &row, &slot) && wanted(ids[i], row, slot)) found.emplace_back(row, ids[i]);
  }
  return sorted_by_row(std::move(found));
}

}  // namespace

std::vector<int64_t> Engine::kept_ids(int32_t t) {
  const auto guard = lock_settled("listing a table");
  const Table& source = table(t);
  return ids_by_row(
      source, [&](int64_t, uint32_t row, uint32_t slot) { return slot != kNoSlot || source.store.has(row); });
}

std::vector<int64_t> Engine::changed_ids(int32_t t, uint64_t since, int64_t* looked_at) {
  const auto guard = lock_settled("listing a table");
  const Table& source = table(t);
  if (!source.columns.has(Column::kVersion)) {
    throw std::invalid_argument("table '" + source.spec().name + "' does not keep versions of its rows");
  }
  const auto wanted = [&](int64_t, uint32_t row, uint32_t) {
    ++*looked_at;
    return source.columns.version(row) > since;
  };
  *looked_at = 0;
  return source.changes.knows(since) ? ids_by_row(source, source.changes.ids_after(since), wanted)
                                     : ids_by_row(source, wanted);
}

// Rows of a batch in flight have the batch's version, and their update is yet to come.
uint64_t Engine::version() {
  const auto guard = lock();
  const auto& in_flight = group_.uses.in_flight();
  return in_flight.empty() ? group_.uses.serial() : in_flight.front()->serial - 1;
}

void Engine::find_rows(int32_t t, const int64_t* ids, int64_t count, int64_t* rows, int32_t* slots) {
  const auto guard = lock_settled("finding rows");
  Table& source = table(t);
  if (!source.spec().hashed) check_index_ids(source, ids, count);
  for (int64_t i = 0; i < count; ++i) {
    if (!source.spec().hashed) {
      rows[i] = ids[i];
      slots[i] = static_cast<int32_t>(~source.row_slots()[ids[i]]);
      continue;
    }
    const IdMap::Entry entry = source.map().find(ids[i], IdMap::hash(ids[i]));
    rows[i] = entry ? static_cast<int64_t>(source.row_of(ids[i], entry)) : -1;
    slots[i] = entry ? static_cast<int32_t>(entry.slot()) : -1;
  }
}

std::vector<int64_t> Engine::others(int32_t t, const int64_t* ids, int64_t count) {
  const auto guard = lock_settled("listing a table");
  const Table& source = table(t);
  IdMap given(count);
  for (int64_t i = 0; i < count; ++i) {
    bool added = false;
    given.reserve(1);
    given.find_or_add(ids[i], IdMap::hash(ids[i]), 0, &added);
  }
  return ids_by_row(source, [&](int64_t id, uint32_t, uint32_t) { return !given.find(id, IdMap::hash(id)); });
}

void Engine::insert(int32_t t, const int64_t* ids, int64_t count, int64_t* rows, int32_t* slots) {
  const auto guard = lock_settled("adding rows");
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
    for (const auto& [id, row] : added_ids) target->begin_row(row);
  } catch (...) {
    for (auto added = added_ids.rbegin(); added != added_ids.rend(); ++added) {
      target->directory().undo_add(added->first, added->second, bound_before);
    }
    throw;
  }
}

void Engine::reserve_rows(int32_t t, const int64_t* rows, int64_t count) {
  const auto guard = lock_settled("reserving rows");
  Table& target = table(t);
  check_rows(target, rows, count);
  int64_t fresh = 0;
  for (int64_t i = 0; i < count; ++i) fresh += !target.store.has(rows[i]);
  if (!target.store.on_disk()) {
    group_.memory.require(saturated_product(fresh, group_.layout.bytes), target.spec().name);
  }
  for (int64_t i = 0; i < count; ++i) target.store.map(rows[i]);
}

void Engine::write_rows(int32_t t, const int64_t* ids, const int64_t* rows, int64_t count,
                        const char* records) {
  reserve_rows(t, rows, count);
  const auto guard = lock_settled("writing rows");
  const std::unique_lock<std::shared_mutex> alone(records_mutex_);
  Table& target = table(t);
  target.store.will_need(rows, count);
  for (int64_t i = 0, end = 0; i < count; i = end) {  // rows of a load follow each other
    for (end = i + 1; end < count && rows[end] == rows[end - 1] + 1; ++end) continue;
    target.store.write_run(rows[i], end - i, records + i * group_.layout.bytes, group_.layout.bytes);
  }
  if (Candidates& candidates = target.admission->candidates; candidates.size() > 0) {
    for (int64_t i = 0; i < count; ++i) candidates.erase(ids[i]);  // an id with a row waits for none
  }
  if (!target.columns.has(Column::kVersion)) return;
  // A save of all that changed since the latest batch has to find these rows as well.
  const uint64_t newest = group_.uses.newest_version();
  target.changes.reserve(count, target.row_bound(), newest);
  for (int64_t i = 0; i < count; ++i) {
    target.changes.add(ids[i], target.columns.exchange_version(rows[i], newest));
  }
}

void Engine::load_rows(int32_t t, const int64_t* ids, int64_t count, const std::vector<RecordPart>& parts,
                       bool whole, int64_t* rows) {
  constexpr int64_t kPieceBytes = int64_t{256} << 10;  // which stay in a core's cache
  {
    std::vector<int32_t> slots(static_cast<size_t>(count));
    insert(t, ids, count, rows, slots.data());
  }
  const int64_t bytes = group_.layout.bytes;
  if (whole && parts.size() == 1 && parts[0].bytes == bytes) {
    write_rows(t, ids, rows, count, parts[0].values);
    return;
  }
  const int64_t most = std::min(count, std::max<int64_t>(1, kPieceBytes / bytes));
  std::vector<char> records(static_cast<size_t>(most * bytes));
  for (int64_t begin = 0; begin < count; begin += most) {
    const int64_t some = std::min(most, count - begin);
    if (!whole) read_rows(t, ids + begin, rows + begin, some, records.data());
    for (const RecordPart& part : parts) {
      const char* values = part.values + begin * part.bytes;
      char* record = records.data() + part.begin;
      for (int64_t i = 0; i < some; ++i, values += part.bytes, record += bytes) {
        std::memcpy(record, values, static_cast<size_t>(part.bytes));
      }
    }
    write_rows(t, ids + begin, rows + begin, some, records.data());
  }
}

int64_t Engine::remove(int32_t t, const int64_t* ids, int64_t count, bool candidates) {
  const auto guard = lock_settled("removing rows");
  const std::unique_lock<std::shared_mutex> alone(records_mutex_);
  table(t);  // checked
  return remove_ids(&group_, t, ids, count, candidates);
}

void Engine::clear_table(int32_t t) {
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

void Engine::initial_records(int32_t t, const int64_t* ids, int64_t count, char* records) {
  const auto guard = lock();
  const Table& source = table(t);
  for (int64_t i = 0; i < count; ++i) source.initializer.write(ids[i], records + i * group_.layout.bytes);
}

}  // namespace rec_sdk
