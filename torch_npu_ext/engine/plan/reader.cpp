#include "torch_npu_ext/engine/plan/reader.h"

#include <algorithm>
#include <cstring>

#include "torch_npu_ext/engine/plan/planner.h"

namespace rec_sdk {
namespace {

constexpr int64_t kPrefetchDistance = 32;

int64_t valid_id(const Table& table, int64_t id) {
  const bool inside = table.spec().hashed || (id >= 0 && id < table.spec().num_embeddings);
  return inside ? id : 0;
}

// Returns the slot of the id. If the id is not cached, returns kNoSlot and stores its row in `row`. If the id
// has no row and the table has an admission rule, returns the default slot.
uint32_t locate(Table& table, int64_t id, ReadPlan::HostRow* row) {
  row->id = id;
  if (!table.spec().hashed) {
    row->row = static_cast<uint32_t>(id);
    row->known = true;
    return ~table.row_slots()[id];
  }
  const IdMap::Entry entry = table.map().find(id, IdMap::hash(id));
  row->known = static_cast<bool>(entry);
  if (!entry) return table.spec().rules.admission() != nullptr ? table.default_slot() : kNoSlot;
  row->row = table.row_of(id, entry);
  return entry.slot();
}

}  // namespace

void Reader::find(const BatchInput& input, int64_t bag_begin, int64_t bag_end, Group* group, ReadPlan* plan) {
  const int64_t features = static_cast<int64_t>(group->features.size());
  check_batch(input, features, true);
  slice_batch(input, features, bag_begin, bag_end, &batch_);
  find_bounds_errors(*group, batch_, &bounds_errors_);
  plan->offsets.resize(static_cast<size_t>(batch_.bags) + 1);
  plan->index.resize(static_cast<size_t>(batch_.lookups));
  write_offsets(input, batch_, plan->offsets.data());
  found_.ensure(static_cast<size_t>(batch_.lookups));
  probe(group, plan);
  if (!plan->all_resident) {
    group->write_backs.prepare(true);
    compact(*group, plan);
  }
  for (const BoundsError& error : bounds_errors_) {
    if (group->tables[error.table].spec().bounds_check == BoundsCheck::kWarning) group->warn_bounds(error);
  }
}

// Sets the entry of each lookup in `index` to the slot of its row. If the row has no slot, the entry is -1,
// and found_ contains the row.
void Reader::probe(Group* group, ReadPlan* plan) {
  for (const Batch::Piece& piece : batch_.pieces) {
    Table& table = group->tables[group->features[piece.feature].table];
    const int64_t shift = piece.source - piece.begin;
    for (int64_t i = piece.begin; i < piece.end; ++i) {
      if (i + kPrefetchDistance < piece.end) {
        table.prefetch_slot(valid_id(table, batch_.values[i + kPrefetchDistance + shift]));
      }
      found_[i].table = group->features[piece.feature].table;
      const uint32_t slot = locate(table, valid_id(table, batch_.values[i + shift]), &found_[i]);
      plan->index[i] = static_cast<int32_t>(slot);  // kNoSlot is -1
      plan->all_resident = plan->all_resident && slot != kNoSlot;
    }
  }
}

// Fills resident_slots and host_rows without duplicates, and replaces the slots in `index` by positions in
// the concatenation of the two.
void Reader::compact(const Group& group, ReadPlan* plan) {
  stamps_.ensure(static_cast<size_t>(group.slots));
  if (++epoch_ == 0) {
    stamps_ = HugeArray<uint64_t>(stamps_.size());
    epoch_ = 1;
  }
  IdMap host_places;  // positions in host_rows of the ids of one table
  int32_t table = -1;
  for (size_t i = 0; i < plan->index.size(); ++i) {
    const int32_t slot = plan->index[i];
    if (slot >= 0) {
      uint64_t& stamp = stamps_[slot];
      if (stamp >> 32 != epoch_) {
        stamp = static_cast<uint64_t>(epoch_) << 32 | plan->resident_slots.size();
        plan->resident_slots.push_back(slot);
      }
      plan->index[i] = static_cast<int32_t>(stamp & 0xFFFFFFFFu);
      continue;
    }
    const ReadPlan::HostRow& row = found_[i];
    if (row.table != table) host_places.clear();
    table = row.table;
    host_places.reserve(1);
    bool added = false;
    const uint32_t next = static_cast<uint32_t>(plan->host_rows.size());
    const uint32_t place = host_places.find_or_add(row.id, IdMap::hash(row.id), next, &added).row();
    if (added) {
      plan->host_rows.push_back(row);
      if (row.known) add_source(&plan->sources, group.write_backs.serial_of(row.table, row.row));
    }
    plan->index[i] =
        -1 - static_cast<int32_t>(place);  // replaced below, when the number of resident rows is known
  }
  const int32_t resident = static_cast<int32_t>(plan->resident_slots.size());
  for (int32_t& index : plan->index) {
    if (index < 0) index = resident - 1 - index;
  }
}

void Reader::will_need(const Group& group, const ReadPlan& plan) {
  std::vector<int64_t> rows;
  for (size_t i = 0; i < plan.host_rows.size();) {
    const int32_t table = plan.host_rows[i].table;
    rows.clear();
    for (; i < plan.host_rows.size() && plan.host_rows[i].table == table; ++i) {
      if (plan.host_rows[i].known) rows.push_back(plan.host_rows[i].row);
    }
    const HostStore& store = group.tables[table].store;
    if (store.on_disk()) store.will_need(rows.data(), static_cast<int64_t>(rows.size()));
  }
}

void Reader::read(const Group& group, const ReadPlan& plan, char* records, InitialRows* initial) {
  will_need(group, plan);
  for (size_t i = 0; i < plan.host_rows.size(); ++i) {
    const ReadPlan::HostRow& row = plan.host_rows[i];
    const Table& table = group.tables[row.table];
    if (!row.known || !table.store.read(row.row, records)) {
      table.initializer.write(row.id, records);
      if (initial != nullptr) initial->add(static_cast<int64_t>(i), row.table);
    }
    records += group.layout.bytes;
  }
}

}  // namespace rec_sdk
