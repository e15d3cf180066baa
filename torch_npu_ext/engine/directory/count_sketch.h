// A count-min sketch: approximate counts of ids in memory that does not grow with their number (Cormode and
// Muthukrishnan, "An improved data stream summary: the count-min sketch and its applications", 2005), with
// conservative update (Estan and Varghese, "New directions in traffic measurement and accounting", 2002). The
// sketch has `depth` rows of `width` cells, and an id has one cell in each row. Each of these cells is at
// least the id's count, so the minimum of the cells never underestimates it.
#pragma once

#include <cstdint>
#include <vector>

#include "torch_npu_ext/engine/base/id_hash.h"
#include "torch_npu_ext/engine/base/memory.h"
#include "torch_npu_ext/engine/directory/id_map.h"

namespace rec_sdk {

// The shape of a sketch. Cells are only as wide as counts up to `enough` require. A cell saturates at its
// maximum.
struct SketchShape {
  int64_t width = 0, depth = 0, cell_bytes = 0;

  // Returns the shape of a sketch of at most `bytes` bytes, but with at least one cell per row. Precondition:
  // depth > 0.
  static SketchShape of(int64_t bytes, int64_t depth, uint32_t enough);
  int64_t cells() const { return width * depth; }
  int64_t bytes() const { return cells() * cell_bytes; }
  uint32_t full() const { return static_cast<uint32_t>((uint64_t{1} << (8 * cell_bytes)) - 1); }
};

class CountSketch {
 public:
  // A log of counted ids, with which undo() restores the sketch: the `depth` cells of each id, and their
  // former values.
  struct Log {
    std::vector<uint64_t, Unset<uint64_t>> cells;
    std::vector<uint32_t, Unset<uint32_t>> before;
    void clear() {
      cells.clear();
      before.clear();
    }
  };

  CountSketch() = default;                         // an object without a sketch
  explicit CountSketch(const SketchShape& shape);  // throws std::bad_alloc

  bool any() const { return shape_.width > 0; }
  const SketchShape& shape() const { return shape_; }
  int64_t bytes() const { return shape_.bytes(); }
  // Returns the sum of all counted shows. halve() halves it like the cells.
  int64_t counted() const { return counted_; }

  // Extends the log by `ids` ids and returns the index of the first new cell. For each id, find() then writes
  // its cells to the log, which the caller passes to the other functions. All of the ids must be found and
  // added before undo(). Throws std::bad_alloc.
  size_t extend(int64_t ids, Log* log) const;
  REC_SDK_ALWAYS_INLINE void find(int64_t id, uint64_t* cells) const {
    const uint64_t hash = IdSeed::hash(id), width = static_cast<uint64_t>(shape_.width);
    const uint64_t* const seeds = seeds_.data();
    const size_t depth = seeds_.size();
    for (size_t r = 0; r < depth; ++r) cells[r] = r * width + IdSeed::home(hash, seeds[r], width);
  }
  REC_SDK_ALWAYS_INLINE void prefetch(const uint64_t* cells) const {
    const uint8_t* const bytes = bytes_.data();
    const size_t depth = seeds_.size();
    for (size_t r = 0; r < depth; ++r) rec_sdk::prefetch(bytes + cells[r] * cell_bytes());
  }
  uint32_t estimate(const uint64_t* cells) const;
  // Raises each cell of an id to at least the id's estimate plus `shows`, and writes the former values to
  // `before`.
  void add(const uint64_t* cells, uint32_t shows, uint32_t* before) noexcept;

  uint32_t estimate(int64_t id) const;
  void add(int64_t id, uint32_t shows, Log* log);     // throws std::bad_alloc
  void undo(const Log& log, int64_t shows) noexcept;  // undoes the latest calls of add()
  void halve() noexcept;
  void clear() noexcept;

  // Returns the state of the sketch for a save: the shape and counted(), then the cells row by row.
  std::vector<uint8_t> state() const;
  // Restores the sketch from saved states, whose shapes may differ. No estimate becomes lower than in the
  // saved sketches: a cell becomes the maximum of the saved cells that may share an id with it. Counts of an
  // id in several states are not added, so each id must have been counted by one sketch only. Throws
  // std::invalid_argument for an invalid state, and then changes nothing.
  void set_states(const std::vector<std::vector<uint8_t>>& states);

 private:
  uint64_t cell_bytes() const { return static_cast<uint64_t>(shape_.cell_bytes); }
  static uint64_t seed(int64_t row) {
    return IdSeed::fold(static_cast<uint64_t>(row + 1) * 0x9E3779B97F4A7C15ull, 0xD6E8FEB86659FD93ull) | 1;
  }
  template <class Cell>
  uint32_t least(const uint64_t* cells) const;
  template <class Cell>
  void raise(const uint64_t* cells, uint32_t shows, uint32_t* before) noexcept;
  uint32_t get(uint64_t cell) const;
  void set(uint64_t cell, uint32_t value) noexcept;

  SketchShape shape_;
  std::vector<uint64_t> seeds_;  // [depth]
  int64_t counted_ = 0;
  HugeArray<uint8_t> bytes_;
};

}  // namespace rec_sdk
