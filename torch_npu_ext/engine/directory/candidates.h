// The candidates of a table: ids that it counted but has not admitted, with their counts. A hash map with
// linear probing, with 16 bytes per position, or 32 with clicks or timestamps.
#pragma once

#include <cstdint>

#include "torch_npu_ext/engine/base/memory.h"
#include "torch_npu_ext/engine/directory/id_map.h"

namespace rec_sdk {

class Candidates {
 public:
  // `count` is the number of lookups, at least 1. `last_use` is the low 32 bits of TableClock::batches at the
  // last lookup. `clicks` and `timestamp` are 0 in a map that does not keep them.
  struct Values {
    uint32_t count = 0, last_use = 0, clicks = 0;
    int64_t timestamp = 0;
  };

  explicit Candidates(bool wide) : Candidates(wide, 0, IdSeed(kUsualSteps)) {}

  int64_t size() const { return size_; }
  int64_t places() const { return static_cast<int64_t>(places_); }
  // Returns the position where the search for an id begins; 0 if the map is empty.
  uint64_t home(int64_t id) const { return IdSeed::home(IdSeed::hash(id), seed_.value(), places_); }
  int64_t bytes() const { return static_cast<int64_t>(places_ * cells_of_place_ * sizeof(Cell)); }
  // Returns the bytes of the new arrays that `extra` more ids require; 0 if they fit into the present ones.
  int64_t growth(int64_t extra) const;
  void reserve(int64_t extra);              // throws std::bad_alloc
  int64_t moves() const { return moves_; }  // the number of rehashes, each of which invalidates all positions
  void shrink() noexcept;                   // shrinks the map if a fourth of its memory suffices

  REC_SDK_ALWAYS_INLINE void prefetch(uint64_t place) const { rec_sdk::prefetch(cell(place)); }
  REC_SDK_ALWAYS_INLINE void prefetch_near(uint64_t place) const { rec_sdk::prefetch_near(cell(place)); }
  bool has_room() const { return size_ < room_; }  // growth(1) == 0
  // Returns the position of the id, or -1. The position is valid until the next call that changes the map.
  int64_t find(int64_t id) const {
    if (places_ == 0) return -1;
    for (uint64_t p = home(id);; p = next(p)) {
      if (entry(p).count == 0) return -1;
      if (entry(p).id == id) return static_cast<int64_t>(p);
    }
  }
  // Returns the position of the id. A new id is added with a count of 0, and the caller must set() its values
  // next. Precondition: growth(1) == 0.
  int64_t find_or_add(int64_t id) { return find_or_add(id, home(id)); }
  REC_SDK_ALWAYS_INLINE int64_t find_or_add(int64_t id, uint64_t home) {
    uint64_t p = home;
    while (entry(p).count != 0) {
      if (entry(p).id == id) return static_cast<int64_t>(p);
      p = next(p);
    }
    entry(p) = {id, 0, 0};
    if (wide()) extra(p) = {0, 0, 0};  // clears the values of a former id
    ++size_;
    if (p != home && seed_.crowds(id, distance(home, p), size_ + erased_)) room_ = kCrowded;
    return static_cast<int64_t>(p);
  }
  bool erase(int64_t id) noexcept;

  Values get(int64_t place) const {
    const Entry& found = entry(place);
    if (!wide()) return {found.count, found.last_use, 0, 0};
    return {found.count, found.last_use, extra(place).clicks, extra(place).timestamp};
  }
  void set(int64_t place, const Values& values) noexcept {
    entry(place).count = values.count;
    entry(place).last_use = values.last_use;
    if (wide()) extra(place) = {values.timestamp, values.clicks, 0};
  }
  int64_t id(int64_t place) const { return entry(place).id; }

  template <class Visit>  // visit(id, values)
  void for_each(Visit visit) const {
    for (uint64_t p = 0; p < places_; ++p) {
      if (entry(p).count != 0) visit(entry(p).id, get(static_cast<int64_t>(p)));
    }
  }
  void clear();

 private:
  struct Entry {
    int64_t id;
    uint32_t count;  // 0 if the position is free
    uint32_t last_use;
  };
  struct Extra {
    int64_t timestamp;
    uint32_t clicks, unused;
  };
  // A position consists of an entry and, in a wide map, the extra values in the next cell. Both are in one
  // cache line in most cases.
  union Cell {
    Entry entry;
    Extra extra;
  };

  static constexpr int64_t kUsualSteps =
      8;  // an insertion takes 4 steps in a full map, and 1 on average while the map fills
  static constexpr int64_t kCrowded = -1;

  Candidates(bool wide, uint64_t places, const IdSeed& seed);

  bool wide() const { return cells_of_place_ == 2; }
  const Cell* cell(uint64_t place) const { return cells_.data() + place * cells_of_place_; }
  Entry& entry(uint64_t place) const { return cells_[place * cells_of_place_].entry; }
  Extra& extra(uint64_t place) const { return cells_[place * cells_of_place_ + 1].extra; }

  uint64_t next(uint64_t p) const { return p + 1 == places_ ? 0 : p + 1; }
  uint64_t distance(uint64_t from, uint64_t to) const { return to >= from ? to - from : to + places_ - from; }
  static uint64_t places_for(int64_t ids) { return static_cast<uint64_t>(ids + ids / 2 + 16); }
  // Returns the maximum number of ids that fit into `places` positions; the inverse of places_for().
  static int64_t ids_in(uint64_t places) {
    return places < 16 ? 0 : (2 * (static_cast<int64_t>(places) - 16) + 1) / 3;
  }
  uint64_t places_with(int64_t extra) const;
  void rehash(uint64_t places);

  uint64_t cells_of_place_, places_;
  IdSeed seed_;
  int64_t size_ = 0, erased_ = 0, moves_ = 0;
  int64_t
      room_;  // the capacity in ids; kCrowded: the ids are clustered and must be rehashed with another seed
  HugeArray<Cell> cells_;
};

}  // namespace rec_sdk
