// A set of rows of several tables, for frequent lookups of rows that are mostly not in the set. It takes 8 to
// 16 bytes per row and reuses its memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "torch_npu_ext/engine/base/id_hash.h"

namespace rec_sdk {

class RowSet {
 public:
  // Replaces the contents: rows[offsets[t]], ..., rows[offsets[t + 1] - 1] are the rows of table t, all
  // distinct. Throws std::bad_alloc.
  void assign(const std::vector<int32_t>& offsets, const uint32_t* rows) {
    parts_.clear();
    size_t cells = 0;
    for (size_t t = 0; t + 1 < offsets.size(); ++t) {
      Part part{cells, kLeastBits};
      while (int64_t{1} << part.bits < 2 * int64_t{offsets[t + 1] - offsets[t]}) ++part.bits;
      cells += size_t{1} << part.bits;
      parts_.push_back(part);
    }
    cells_.assign(cells, 0);
    for (size_t t = 0; t < parts_.size(); ++t) {
      for (int32_t i = offsets[t]; i < offsets[t + 1]; ++i)
        *cell_of(parts_[t], rows[i], hash(rows[i])) = rows[i] + 1;
    }
  }

  static REC_SDK_ALWAYS_INLINE uint64_t hash(uint32_t row) { return IdSeed::hash(row); }
  // Returns whether the set contains the row. A set is empty before assign().
  REC_SDK_ALWAYS_INLINE bool has(int32_t table, uint32_t row, uint64_t hash) const {
    return !parts_.empty() && *cell_of(parts_[table], row, hash) != 0;
  }
  bool has(int32_t table, uint32_t row) const { return has(table, row, hash(row)); }

 private:
  // The cells of one table. At least half of them are free.
  struct Part {
    size_t first;
    int bits;  // log2 of the number of cells
  };
  static constexpr int kLeastBits = 2;

  // Returns the cell of the row, or the free cell where the search for it ends. A cell contains row + 1, or 0
  // if it is free; this is unambiguous, because there is no row 2^32 - 1.
  REC_SDK_ALWAYS_INLINE uint32_t* cell_of(const Part& part, uint32_t row, uint64_t hash) const {
    const uint64_t mask = (uint64_t{1} << part.bits) - 1;
    uint32_t* const cells = const_cast<uint32_t*>(cells_.data()) + part.first;
    uint64_t i = hash >> (64 - part.bits);
    while (cells[i] != 0 && cells[i] != row + 1) i = (i + 1) & mask;
    return cells + i;
  }

  std::vector<Part> parts_;  // [T]
  std::vector<uint32_t> cells_;
};

}  // namespace rec_sdk
