// The rows of a table that a save has yet to take: one moment of the table, while training goes on. A row is
// pending until it is taken; a pending row is taken before it is changed. So a pending row has the id, the
// record and, unless they are kept here, the columns that it had at the moment.
#pragma once

#include <algorithm>
#include <cstdint>
#include <unordered_map>
#include <vector>

#include "torch_npu_ext/engine/directory/row_columns.h"

namespace rec_sdk {

class Snapshot {
 public:
  explicit Snapshot(int64_t rows)
      : bits_(static_cast<size_t>((rows + 63) / 64)), moving_(bits_.size()), rows_(rows) {}

  void add(int64_t row) {
    uint64_t& word = bits_[static_cast<size_t>(row >> 6)];
    pending_ += (word >> (row & 63) & 1) == 0;
    word |= uint64_t{1} << (row & 63);
  }
  void add_all() {
    std::fill(bits_.begin(), bits_.end(), ~uint64_t{0});
    if (rows_ % 64 != 0) bits_.back() = (uint64_t{1} << (rows_ % 64)) - 1;
    pending_ = rows_;
  }
  void leave_out(int64_t row) {
    uint64_t& word = bits_[static_cast<size_t>(row >> 6)];
    pending_ -= static_cast<int64_t>(word >> (row & 63) & 1);
    word &= ~(uint64_t{1} << (row & 63));
  }
  bool has(int64_t row) const {
    return row < rows_ && (bits_[static_cast<size_t>(row >> 6)] >> (row & 63) & 1) != 0;
  }
  int64_t pending() const { return pending_; }

  // Rows whose records may not be read now, though they are pending.
  void set_moving(int64_t row, bool moving) {
    if (row >= rows_) return;
    uint64_t& word = moving_[static_cast<size_t>(row >> 6)];
    const uint64_t bit = uint64_t{1} << (row & 63);
    word = moving ? word | bit : word & ~bit;
  }
  bool has_still(int64_t row) const {
    return has(row) && (moving_[static_cast<size_t>(row >> 6)] >> (row & 63) & 1) == 0;
  }

  // The columns of a row are about to change, and the row is not taken yet.
  void keep(int64_t row, const RowColumns& columns) noexcept {
    if (!has(row)) return;
    try {
      kept_.try_emplace(row, columns.read(row));
    } catch (...) {
      failed_ = true;
    }
  }
  bool failed() const { return failed_; }  // memory was short: what is taken from now on is worth nothing
  int64_t kept() const { return static_cast<int64_t>(kept_.size()); }

  // Precondition: has(row).
  RowColumnValues take(int64_t row, const RowColumns& columns) {
    bits_[static_cast<size_t>(row >> 6)] &= ~(uint64_t{1} << (row & 63));
    --pending_;
    const auto found = kept_.find(row);
    if (found == kept_.end()) return columns.read(row);
    const RowColumnValues values = found->second;
    kept_.erase(found);
    return values;
  }

 private:
  std::vector<uint64_t> bits_, moving_;
  int64_t rows_;
  int64_t pending_ = 0;
  std::unordered_map<int64_t, RowColumnValues> kept_;
  bool failed_ = false;
};

}  // namespace rec_sdk
