#include "torch_npu_ext/engine/lifecycle/removal.h"

#include <algorithm>
#include <new>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace rec_sdk {
namespace {

struct Found {
  bool known;  // whether there is anything to remove
  uint32_t row, slot;
};

Found find(const Table& table, int64_t id) {
  if (!table.spec().hashed) {
    const uint32_t slot = ~table.row_slots()[id];
    return {slot != kNoSlot || table.store.has(id), static_cast<uint32_t>(id), slot};
  }
  const IdMap::Entry entry = table.map().find(id, IdMap::hash(id));
  if (!entry) return {false, 0, kNoSlot};
  return {true, table.row_of(id, entry), entry.slot()};
}

void check_removable(Group* group, int32_t t, const int64_t* ids, int64_t count) {
  const Table& table = group->tables[t];
  group->uses.mark_held();
  int64_t in_flight = 0, with_sums = 0;
  for (int64_t i = 0; i < count; ++i) {
    const Found found = find(table, ids[i]);
    if (!found.known) continue;
    const int64_t slot = found.slot == kNoSlot ? -1 : static_cast<int64_t>(found.slot);
    in_flight += slot >= 0 && group->uses.marked(slot);
    with_sums += group->window.has(t, found.row, slot);
  }
  if (in_flight > 0) {
    throw std::runtime_error("table '" + table.spec().name + "': " + std::to_string(in_flight) +
                             " of the ids to remove are used by batches in flight; finish those before, or "
                             "remove other ids");
  }
  if (with_sums > 0) {
    throw std::runtime_error("table '" + table.spec().name + "': " + std::to_string(with_sums) +
                             " of the ids to remove have gradients of an open accumulation window; remove "
                             "them at its end");
  }
}

bool remove_id(Group* group, Table* table, int64_t id) noexcept {
  const Found found = find(*table, id);
  if (!found.known) return false;
  if (found.slot != kNoSlot) {
    group->uses.forget(found.slot);
    table->free_slot(found.slot);
  }
  table->forget_row(found.row);
  table->drop_id(id, found.row);
  return true;
}

using Removals = std::vector<std::pair<uint64_t, int64_t>>;

// Drops all but the latest removal of each id, because a delta save needs no other.
void keep_latest(Removals* log) noexcept {
  const auto by_id = [](const auto& a, const auto& b) {
    return std::make_pair(a.second, ~a.first) < std::make_pair(b.second, ~b.first);
  };
  std::sort(log->begin(), log->end(), by_id);
  const auto same_id = [](const auto& a, const auto& b) { return a.second == b.second; };
  log->erase(std::unique(log->begin(), log->end(), same_id), log->end());
  std::sort(log->begin(), log->end());  // oldest first
}

// Reserves space for `count` more entries. A full log is first reduced to one entry per id and then grows
// until half of it is free, so the amortized cost of a removal is small.
void reserve_removals(Removals* log, int64_t count) {
  if (log->size() + count <= log->capacity()) return;
  keep_latest(log);
  if (2 * (log->size() + count) > log->capacity()) log->reserve(2 * (log->size() + count));
}

}  // namespace

void shrink_removals(Removals* log) noexcept {
  if (4 * log->size() >= log->capacity()) return;
  try {
    Removals(*log).swap(*log);
  } catch (const std::bad_alloc&) {  // the log keeps its capacity
  }
}

int64_t remove_ids(Group* group, int32_t t, const int64_t* ids, int64_t count, bool candidates) {
  Table& table = group->tables[t];
  check_index_ids(table, {ids, count});
  check_removable(group, t, ids, count);
  table.extend_rows();
  const bool logged = table.columns.has(Column::kVersion);
  auto& log = table.removals.removed;
  if (logged) reserve_removals(&log, count);
  int64_t removed = 0;
  for (int64_t i = 0; i < count; ++i) {
    if (!remove_id(group, &table, ids[i])) continue;
    ++removed;
    if (logged) log.emplace_back(group->uses.newest_version(), ids[i]);
  }
  for (int64_t i = 0; candidates && i < count; ++i) table.admission->candidates.erase(ids[i]);
  if (table.spec().hashed) table.directory().shrink();
  return removed;
}

void check_index_ids(const Table& table, Span<int64_t> ids) {
  if (table.spec().hashed) return;
  const int64_t rows = table.spec().num_embeddings;
  const auto outside = [rows](int64_t id) { return id < 0 || id >= rows; };
  const int64_t bad = std::count_if(ids.begin(), ids.end(), outside);
  if (bad == 0) return;
  throw std::out_of_range("table '" + table.spec().name + "': id " +
                          std::to_string(*std::find_if(ids.begin(), ids.end(), outside)) +
                          " is out of range for num_embeddings " + std::to_string(rows) + " (" +
                          std::to_string(bad) + " such ids)");
}

}  // namespace rec_sdk
