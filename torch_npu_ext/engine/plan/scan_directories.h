// Directories with which a scan finds the rows of ids: one class for hash tables, one for index tables.
#pragma once

#include "torch_npu_ext/engine/plan/scan.h"

namespace rec_sdk {

// Calls use(ids) with the ids of the piece, an array of int64 or int32.
template <class Use>
void with_ids(const Batch& batch, const Batch::Piece& piece, const Use& use) {
  if (batch.values.wide) {
    use(static_cast<const int64_t*>(batch.values.data) + piece.source);
  } else {
    use(static_cast<const int32_t*>(batch.values.data) + piece.source);
  }
}

// A list of the missing rows of a table. It assigns keys to them: first the free slots, then keys beyond all
// slots.
class MissList {
 public:
  // `first`: the index of the table's first miss among the misses of all tables.
  MissList(const Table& table, int64_t slots, Miss* misses, int64_t first, int64_t* count)
      : misses_(misses + first),
        count_(count),
        table_(&table),
        free_slots_(table.free_slots()),
        beyond_(static_cast<RowKey>(slots + first)) {}

  RowKey add(int64_t id, uint32_t row, bool added) {
    misses_[*count_] = {id, row, added};
    const RowKey key =
        *count_ < free_slots_ ? table_->peek_slot(*count_) : beyond_ + static_cast<RowKey>(*count_);
    ++*count_;
    return key;
  }

 private:
  Miss* misses_;
  int64_t* count_;
  const Table* table_;
  int64_t free_slots_;
  RowKey beyond_;
};

// Both directories have the same interface. places().of(id) returns the location where the search for an id
// begins; it is valid until reserve() returns true. of_whole() requires !grows() and is faster. peek()
// examines only that location: it returns the key of the row, or kNoSlot if the key is not there. After
// kNoSlot, key() and find() read the address beyond(location) next; with `missing` false, that is the
// location itself. key() returns the key of the row, and assigns one to a missing row; `added` is set to
// whether the id is new. find() returns kNoSlot for a missing row and changes nothing; `known` is set to
// whether the table has the id.
class HashDirectory {
 public:
  using Place = const IdMap::Bucket*;
  struct Places {
    IdMap::Homes homes;
    REC_SDK_ALWAYS_INLINE Place of(int64_t id) const { return homes.of(IdMap::hash(id)); }
    REC_SDK_ALWAYS_INLINE Place of_whole(int64_t id) const { return homes.of_whole(IdMap::hash(id)); }
    bool grows() const { return homes.grows(); }
  };

  HashDirectory(Table* table, MissList misses) : table_(table), misses_(misses) {}

  Places places() const { return {table_->map().homes()}; }
  bool reserve(int64_t extra) { return table_->reserve_ids(extra); }

  static REC_SDK_ALWAYS_INLINE RowKey peek(int64_t id, Place home) { return IdMap::slot_at(*home, id); }
  static REC_SDK_ALWAYS_INLINE const void* beyond(Place home, bool missing = true) { return home + missing; }

  REC_SDK_ALWAYS_INLINE RowKey find(int64_t id, bool* known) const {
    const IdMap::Entry entry = table_->map().find(id, IdMap::hash(id));
    *known = static_cast<bool>(entry);
    return entry ? entry.slot() : kNoSlot;
  }
  RowKey key(int64_t id) {
    bool added = false;
    return key(id, &added);
  }
  RowKey key(int64_t id, bool* added) {
    const IdMap::Entry entry = table_->directory().find_or_add(id, IdMap::hash(id), added);
    if (!entry.has_slot()) {
      entry.set_slot(misses_.add(id, entry.row(), *added));
      if (*added) table_->check_capacity(table_->rows(), id);
    }
    return entry.slot();
  }

 private:
  Table* table_;
  MissList misses_;
};

class IndexDirectory {
 public:
  using Place = const uint32_t*;
  struct Places {
    uint32_t* row_slots;
    uint64_t rows;
    // Returns 0 for an id out of range; such ids were counted before the scan.
    REC_SDK_ALWAYS_INLINE uint64_t row_of(int64_t id) const {
      return static_cast<uint64_t>(id) < rows ? static_cast<uint64_t>(id) : 0;
    }
    REC_SDK_ALWAYS_INLINE Place of(int64_t id) const { return row_slots + row_of(id); }
    REC_SDK_ALWAYS_INLINE Place of_whole(int64_t id) const { return of(id); }
    static constexpr bool grows() { return false; }
  };

  IndexDirectory(Table* table, MissList misses)
      : places_{table->row_slots(), static_cast<uint64_t>(table->spec().num_embeddings)}, misses_(misses) {}

  Places places() const { return places_; }
  bool reserve(int64_t) { return false; }

  static REC_SDK_ALWAYS_INLINE RowKey peek(int64_t, Place place) { return ~*place; }
  static REC_SDK_ALWAYS_INLINE const void* beyond(Place place, bool = true) { return place; }

  RowKey find(int64_t,
              bool* known)
      const {  // only called after peek() returned kNoSlot, which in an index table means no slot
    *known = true;
    return kNoSlot;
  }
  RowKey key(int64_t id, bool* added) {
    *added = false;
    return key(id);
  }
  RowKey key(int64_t id) {
    const uint64_t row = places_.row_of(id);
    uint32_t& slot = places_.row_slots[row];
    if (~slot == kNoSlot) slot = ~misses_.add(static_cast<int64_t>(row), static_cast<uint32_t>(row), false);
    return ~slot;
  }

 private:
  Places places_;
  MissList misses_;
};

}  // namespace rec_sdk
