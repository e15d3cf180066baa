// One table of a group: which ids it knows, where their rows are, and its share of the device cache.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "torch_npu_ext/host/cache_policy.h"
#include "torch_npu_ext/host/host_store.h"
#include "torch_npu_ext/host/id_map.h"
#include "torch_npu_ext/host/initializers.h"
#include "torch_npu_ext/host/memory.h"

namespace rec_sdk {

enum class BoundsCheck { kFatal, kWarning, kIgnore, kNone };

struct TableSpec {
  std::string name;
  bool hashed;  // any int64 is an id; otherwise 0 <= id < num_embeddings, and the id is the row
  int64_t num_embeddings;
  int64_t slots;     // in the device cache
  int64_t capacity;  // of a hash table; 0 = unlimited
  Initializer initializer;
  uint64_t seed;
  std::vector<float> state_init;  // one per state block
  BoundsCheck bounds_check;
};

class Table {
 public:
  // Throws std::invalid_argument when the spec makes no sense.
  Table(TableSpec spec, const RecordLayout& layout, const std::string& policy, int64_t first_slot,
        MemoryGuard* memory);

  const TableSpec& spec() const { return spec_; }
  int64_t rows() const { return spec_.hashed ? ids_.size() : spec_.num_embeddings; }
  int64_t first_slot() const { return first_slot_; }
  int64_t end_slot() const { return first_slot_ + spec_.slots; }
  bool never_evicts() const;
  int64_t index_bytes() const;  // of the id map and its kin

  // Hash tables. A failed batch erases from the map what it added.
  IdMap& map() { return ids_; }
  bool reserve_ids(int64_t extra);  // room in the map; whether it grew. Throws MemoryLimitError
  void check_capacity(int64_t rows_after, int64_t id) const;  // throws CapacityError

  // Index tables: the slot of each row, complemented, so that zeroed memory means kNoSlot.
  uint32_t* row_slots() const { return row_slots_.data(); }

  REC_SDK_ALWAYS_INLINE void prefetch_slot(int64_t id) const {
    spec_.hashed ? ids_.prefetch(IdMap::hash(id)) : rec_sdk::prefetch(&row_slots_[id]);
  }
  void set_slot(int64_t id, uint32_t slot) {  // of a known id
    if (spec_.hashed) {
      ids_.find(id, IdMap::hash(id)).set_slot(slot);
    } else {
      row_slots_[id] = ~slot;
    }
  }

  void send_away(int64_t id, uint32_t row) {  // a known id loses its slot
    if (spec_.hashed) {
      ids_.find(id, IdMap::hash(id)).set_row(row);
    } else {
      row_slots_[id] = ~kNoSlot;
    }
  }

  // The rows of resident ids: the map of a hash table has either the slot or the row.
  void keep_row(uint32_t slot, uint32_t row) {
    if (spec_.hashed) slot_rows_[slot - first_slot_] = row;
  }
  uint32_t row_in(uint32_t slot, int64_t id) const {
    return spec_.hashed ? slot_rows_[slot - first_slot_] : static_cast<uint32_t>(id);
  }
  // Of a hash table, and not during a plan, when the keys of missing rows are no slots.
  uint32_t row_of(int64_t id, const IdMap::Entry& entry) const {
    return entry.has_slot() ? row_in(entry.slot(), id) : entry.row();
  }

  template <class Visit>  // visit(id, row, slot) of every row, in no order
  void for_each(Visit visit) const {
    if (spec_.hashed) {
      ids_.for_each(
          [&](int64_t id, const IdMap::Entry& entry) { visit(id, row_of(id, entry), entry.slot()); });
      return;
    }
    for (int64_t row = 0; row < spec_.num_embeddings; ++row) {
      visit(row, static_cast<uint32_t>(row), ~row_slots_[row]);
    }
  }

  void clear();  // precondition: no slot is held

  HostStore store;
  RecordInitializer initializer;
  std::unique_ptr<CachePolicy> policy;
  int64_t used_slots = 0;  // slots [first_slot, first_slot + used_slots) hold a row

 private:
  TableSpec spec_;
  int64_t first_slot_;
  MemoryGuard* memory_;
  IdMap ids_;
  HugeArray<uint32_t> slot_rows_;  // [slots] of a hash table: the row in each used slot
  HugeArray<uint32_t> row_slots_;
};

}  // namespace rec_sdk
