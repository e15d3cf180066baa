// One table of a group: its ids, where their rows are, and its slots in the device cache.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "torch_npu_ext/engine/base/memory.h"
#include "torch_npu_ext/engine/directory/change_log.h"
#include "torch_npu_ext/engine/directory/id_map.h"
#include "torch_npu_ext/engine/directory/number_pool.h"
#include "torch_npu_ext/engine/directory/row_columns.h"
#include "torch_npu_ext/engine/directory/row_directory.h"
#include "torch_npu_ext/engine/directory/snapshot.h"
#include "torch_npu_ext/engine/policy/cache_policy.h"
#include "torch_npu_ext/engine/rules/rules.h"
#include "torch_npu_ext/engine/store/host_store.h"
#include "torch_npu_ext/engine/store/initializers.h"

namespace rec_sdk {

enum class BoundsCheck { kFatal, kWarning, kIgnore, kNone };

struct TableSpec {
  std::string name;
  bool hashed;  // true: any int64 is an id; false: 0 <= id < num_embeddings, and the id is the row
  int64_t num_embeddings;
  int64_t slots;     // number of slots in the device cache, without the default slot
  int64_t capacity;  // maximum number of ids of a hash table; 0 means unlimited
  Initializer initializer;
  uint64_t seed;
  std::vector<float> state_init;  // initial value of each block of optimizer state
  BoundsCheck bounds_check;
  ColumnSet columns = {};
  bool default_row = false;     // whether the table has a default slot behind its other slots
  Rules rules = {};             // of a hash table; a table with an admission rule needs a default row
  std::string store_path = {};  // path of the host store's new file; empty for a store in memory
  std::optional<DType> stored_dtype = {};  // dtype of weights in the host store, if it differs from the cache
};

// The removed ids of a table that keeps versions, oldest removal first. Delta saves list them.
struct RemovalLog {
  std::vector<std::pair<uint64_t, int64_t>> removed;  // (version, id); an id may have been added again
  // The log contains all removals after this version. Older entries may have been dropped, or all ids were
  // removed at once by then.
  uint64_t complete_after = 0;
};

class Table {
 public:
  // Throws std::invalid_argument if the spec is invalid.
  Table(TableSpec spec, const RecordLayout& layout, const std::string& policy, int64_t first_slot,
        MemoryGuard* memory);

  const TableSpec& spec() const { return spec_; }
  int64_t rows() const { return spec_.hashed ? directory_.count() : spec_.num_embeddings; }
  int64_t row_bound() const { return spec_.hashed ? directory_.bound() : spec_.num_embeddings; }
  int64_t first_slot() const { return first_slot_; }
  int64_t end_slot() const { return first_slot_ + spec_.slots + (spec_.default_row ? 1 : 0); }
  // Returns the default slot: it contains the constant record that lookups of ids without a row read.
  // Precondition: spec().default_row.
  uint32_t default_slot() const { return static_cast<uint32_t>(first_slot_ + spec_.slots); }
  bool never_evicts() const;
  int64_t index_bytes() const;   // bytes of the id map, or of the slots of an index table
  int64_t column_bytes() const;  // bytes of the columns of all rows and of the logs of changes and removals

  // For hash tables only. A batch whose planning fails undoes its additions to the directory.
  RowDirectory& directory() { return directory_; }
  const IdMap& map() const { return directory_.ids(); }
  bool reserve_ids(int64_t extra);  // returns whether the map grew; throws MemoryLimitError
  void check_capacity(int64_t rows_after, int64_t id) const;  // throws CapacityError

  // Extends the host store and all per-row arrays to row_bound() rows. Throws std::bad_alloc, DiskError.
  void extend_rows();
  void begin_row(
      uint32_t row) noexcept;  // sets the last use and timestamp to now, for an id that no batch added
  void forget_row(uint32_t row) noexcept;  // resets the row to the state of a row that never had an id
  void drop_id(int64_t id,
               uint32_t row) noexcept {  // precondition: the id is known, and its slot, if any, is freed
    if (spec_.hashed) {
      directory_.remove(id, row);
    } else {
      row_slots_[row] = ~kNoSlot;
    }
  }

  // The following functions manage the slots without a row; free_slots() is their number. Freed slots are
  // reused first.
  int64_t free_slots() const { return spec_.slots - used_slots_.count(); }
  int64_t slot_bound() const { return used_slots_.bound(); }
  uint32_t peek_slot(int64_t k) const { return static_cast<uint32_t>(first_slot_ + used_slots_.peek(k)); }
  uint32_t take_slot() { return static_cast<uint32_t>(first_slot_) + used_slots_.take(); }
  void put_back_slot(uint32_t slot, int64_t bound_before) noexcept {  // undoes take_slot(), latest call first
    used_slots_.put_back(slot - static_cast<uint32_t>(first_slot_), bound_before);
  }
  void free_slot(uint32_t slot) noexcept { used_slots_.free(slot - static_cast<uint32_t>(first_slot_)); }

  // For index tables: the slot of each row, stored as its bitwise complement, so that zeroed memory means
  // kNoSlot.
  uint32_t* row_slots() const { return row_slots_.data(); }

  // Returns the id, or 0 if the table is an index table and the id is out of range.
  int64_t known_id(int64_t id) const {
    return spec_.hashed || static_cast<uint64_t>(id) < static_cast<uint64_t>(spec_.num_embeddings) ? id : 0;
  }
  uint32_t slot_of(int64_t id) const {  // kNoSlot if the id is not cached, or unknown to a hash table
    if (!spec_.hashed) return ~row_slots_[id];
    const IdMap::Entry entry = map().find(id, IdMap::hash(id));
    return entry ? entry.slot() : kNoSlot;
  }
  REC_SDK_ALWAYS_INLINE void prefetch_slot(int64_t id) const {
    spec_.hashed ? map().prefetch(IdMap::hash(id)) : rec_sdk::prefetch(&row_slots_[id]);
  }
  void set_slot(int64_t id, uint32_t slot) {  // precondition: the id is known
    if (spec_.hashed) {
      map().find(id, IdMap::hash(id)).set_slot(slot);
    } else {
      row_slots_[id] = ~slot;
    }
  }

  void clear_slot(int64_t id, uint32_t row) {  // precondition: the id is known
    if (spec_.hashed) {
      map().find(id, IdMap::hash(id)).set_row(row);
    } else {
      row_slots_[id] = ~kNoSlot;
    }
  }

  // Stores which row a slot contains. The id map of a hash table contains only the slot of a cached id, so
  // its row is stored here.
  void keep_row(uint32_t slot, uint32_t row) {
    if (spec_.hashed) slot_rows_[slot - first_slot_] = row;
  }
  REC_SDK_ALWAYS_INLINE void prefetch_row(uint32_t slot) const {
    if (spec_.hashed) rec_sdk::prefetch(&slot_rows_[slot - first_slot_]);
  }
  // Returns the row in each slot, as an array that is indexed by the group's slot numbers. Precondition:
  // spec().hashed.
  const uint32_t* rows_of_slots() const { return slot_rows_.data() - first_slot_; }
  uint32_t row_in(uint32_t slot, int64_t id) const {
    return spec_.hashed ? slot_rows_[slot - first_slot_] : static_cast<uint32_t>(id);
  }
  // For hash tables only. Must not be called while a batch is being planned, because the entries of missing
  // rows then have keys that are not slots.
  uint32_t row_of(int64_t id, const IdMap::Entry& entry) const {
    return entry.has_slot() ? row_in(entry.slot(), id) : entry.row();
  }

  // Finds the row of an id, and its slot or kNoSlot; returns false for an unknown id. Must not be called
  // while a batch is being planned.
  bool locate(int64_t id, uint32_t* row, uint32_t* slot) const {
    if (!spec_.hashed) {
      if (known_id(id) != id) return false;
      *row = static_cast<uint32_t>(id);
      *slot = ~row_slots_[id];
      return true;
    }
    const IdMap::Entry entry = map().find(id, IdMap::hash(id));
    if (!entry) return false;
    *row = row_of(id, entry);
    *slot = entry.slot();
    return true;
  }

  template <class Visit>  // calls visit(id, row, slot) for every row, in no order
  void for_each(Visit visit) const {
    if (spec_.hashed) {
      map().for_each(
          [&](int64_t id, const IdMap::Entry& entry) { visit(id, row_of(id, entry), entry.slot()); });
      return;
    }
    for (int64_t row = 0; row < spec_.num_embeddings; ++row) {
      visit(row, static_cast<uint32_t>(row), ~row_slots_[row]);
    }
  }

  void clear();  // precondition: no slot is pinned

  HostStore store;
  RecordInitializer initializer;
  std::unique_ptr<CachePolicy> policy;
  RowColumns columns;
  RemovalLog removals;
  ChangeLog changes;  // used by tables that keep versions
  std::unique_ptr<Admission> admission;
  std::vector<bool> small;  // the rows that the next eviction by norm evicts, indexed by row
  TableClock clock;
  bool frozen = false;  // while true, the clock stands still and end_step() evicts no ids of the table
  std::unique_ptr<Snapshot> snapshot;  // null unless a save has opened a snapshot

 private:
  void prepare();
  HugeArray<uint32_t> make_row_slots() const;

  TableSpec spec_;
  int64_t first_slot_;
  MemoryGuard* memory_;
  RowDirectory directory_;
  NumberPool used_slots_;          // numbered from first_slot
  HugeArray<uint32_t> slot_rows_;  // [slots] of a hash table: the row of each used slot
  HugeArray<uint32_t> row_slots_;
};

}  // namespace rec_sdk
