#include "torch_npu_ext/host/removal.h"

#include <algorithm>
#include <stdexcept>
#include <string>
#include <vector>

namespace rec_sdk {
namespace {

struct Found {
  bool known;  // otherwise there is nothing to remove
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

// Rows that batches in flight evict, ascending: cancelling one brings them back.
std::vector<uint32_t> leaving_rows(const SlotUses& uses, int32_t t) {
  std::vector<uint32_t> rows;
  for (const PlanBuffers* plan : uses.in_flight()) {
    rows.insert(rows.end(), plan->swap_out_rows + plan->out_offsets[t],
                plan->swap_out_rows + plan->out_offsets[t + 1]);
  }
  std::sort(rows.begin(), rows.end());
  return rows;
}

void check_removable(Group* group, int32_t t, const int64_t* ids, int64_t count) {
  const Table& table = group->tables[t];
  group->uses.mark_held();
  const std::vector<uint32_t> leaving = leaving_rows(group->uses, t);
  int64_t in_flight = 0, pending = 0;
  for (int64_t i = 0; i < count; ++i) {
    const Found found = find(table, ids[i]);
    // A row of an index table that is on its way out is not known yet to have more than its initial record.
    if (!found.known && table.spec().hashed) continue;
    const bool resident = found.slot != kNoSlot;
    in_flight += (resident && group->uses.marked(found.slot)) ||
                 std::binary_search(leaving.begin(), leaving.end(), found.row);
    pending += resident ? group->pending_flags[found.slot] != 0 : group->pending.has(t, found.row);
  }
  if (in_flight > 0) {
    throw std::runtime_error("table '" + table.spec().name + "': " + std::to_string(in_flight) +
                             " of the ids to remove are used by batches in flight; finish or cancel those "
                             "before, or remove other ids");
  }
  if (pending > 0) {
    throw std::runtime_error("table '" + table.spec().name + "': " + std::to_string(pending) +
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

}  // namespace

int64_t remove_ids(Group* group, int32_t t, const int64_t* ids, int64_t count) {
  Table& table = group->tables[t];
  if (!table.spec().hashed) check_index_ids(table, ids, count);
  check_removable(group, t, ids, count);
  table.extend_rows();
  int64_t removed = 0;
  for (int64_t i = 0; i < count; ++i) removed += remove_id(group, &table, ids[i]);
  if (table.spec().hashed) table.directory().shrink();
  return removed;
}

void check_index_ids(const Table& table, const int64_t* ids, int64_t count) {
  const int64_t rows = table.spec().num_embeddings;
  const auto outside = [rows](int64_t id) { return id < 0 || id >= rows; };
  const int64_t bad = std::count_if(ids, ids + count, outside);
  if (bad == 0) return;
  throw std::out_of_range("table '" + table.spec().name + "': id " +
                          std::to_string(*std::find_if(ids, ids + count, outside)) +
                          " is out of range for num_embeddings " + std::to_string(rows) + " (" +
                          std::to_string(bad) + " such ids)");
}

}  // namespace rec_sdk
