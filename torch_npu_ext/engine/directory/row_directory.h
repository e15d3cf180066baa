// The map from ids to rows of a hash table. Rows of removed ids are reused, so that per-row arrays need only
// bound() entries.
#pragma once

#include <cstdint>

#include "torch_npu_ext/engine/directory/id_map.h"
#include "torch_npu_ext/engine/directory/number_pool.h"

namespace rec_sdk {

class RowDirectory {
 public:
  // `expected`: the number of ids up to which the map doubles when it grows.
  explicit RowDirectory(int64_t expected = 0) : ids_(expected) {}

  int64_t count() const { return ids_.size(); }    // number of ids
  int64_t bound() const { return rows_.bound(); }  // one past the largest row assigned so far
  const IdMap& ids() const { return ids_; }
  int64_t growth(int64_t extra) const { return ids_.growth(extra); }
  void reserve(int64_t extra) { ids_.reserve(extra); }
  bool grows() const { return ids_.grows(); }

  // Returns the entry of the id; a new id gets the next row and no slot. Precondition: growth(1) == 0.
  IdMap::Entry find_or_add(int64_t id, uint64_t hash, bool* added) {
    const IdMap::Entry entry = ids_.find_or_add(id, hash, rows_.peek(), added);
    if (*added) rows_.take();
    return entry;
  }
  // Undoes a call of find_or_add() that added an id. Several calls are undone in reverse order;
  // `bound_before` is bound() before the first of them. If the directory changed otherwise in between,
  // reserve_removal() must have been called, so that undo_add() cannot fail.
  void undo_add(int64_t id, uint32_t row, int64_t bound_before) noexcept {
    ids_.erase(id, IdMap::hash(id));
    rows_.put_back(row, bound_before);
  }

  void reserve_removal() { rows_.reserve(rows_.bound()); }  // throws std::bad_alloc
  void remove(int64_t id, uint32_t row) noexcept {          // precondition: reserve_removal()
    ids_.erase(id, IdMap::hash(id));
    rows_.free(row);
  }
  template <class Visit>  // calls visit(row) for rows below bound() without an id
  void for_each_free(Visit visit) const {
    rows_.for_each_free(visit);
  }
  void shrink() noexcept { ids_.shrink(); }

  int64_t bytes() const { return ids_.bytes(); }
  void clear() {
    ids_.clear();
    rows_.clear();
  }

 private:
  IdMap ids_;
  NumberPool rows_;
};

}  // namespace rec_sdk
