// The rows of a table that a save has yet to take: one moment of the table, while training goes on. A row is
// pending until it is taken; a pending row is taken before it is changed. So a pending row has the id, the
// record and, unless they are kept here, the columns that it had at the moment.
#pragma once

#include <algorithm>
#include <cstdint>
#include <unordered_map>
#include <utility>
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

  // Rows whose records may not be read now, though they are pending: those that for_each(visit) gives, a
  // function of `plans`. Nothing is done where these are those of the call before: a piece of a save is
  // small, and the rows that move are many.
  template <class ForEach>
  void set_moving(std::vector<uint64_t> plans, const ForEach& for_each) {
    if (moving_known_ && plans == moving_plans_) return;
    moving_known_ = false;
    for (const uint32_t row : moving_rows_) moving_[row >> 6] &= ~(uint64_t{1} << (row & 63));
    moving_rows_.clear();
    for_each([this](uint32_t row) {
      if (row >= rows_) return;
      moving_rows_.push_back(row);
      moving_[row >> 6] |= uint64_t{1} << (row & 63);
    });
    marked_ += static_cast<int64_t>(moving_rows_.size());
    moving_plans_ = std::move(plans);
    moving_known_ = true;
  }
  int64_t marked() const { return marked_; }  // rows that set_moving() has marked, in all
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

  // Preconditions of these: has(row). The second: keep() was called for no row.
  RowColumnValues take(int64_t row, const RowColumns& columns) {
    take(row);
    const auto found = kept_.find(row);
    if (found == kept_.end()) return columns.read(row);
    const RowColumnValues values = found->second;
    kept_.erase(found);
    return values;
  }

  void take(int64_t row) {
    bits_[static_cast<size_t>(row >> 6)] &= ~(uint64_t{1} << (row & 63));
    --pending_;
  }

  REC_SDK_ALWAYS_INLINE void prefetch(int64_t row) const {
    if (row < rows_) rec_sdk::prefetch(&bits_[static_cast<size_t>(row >> 6)]);
  }

  // A snapshot of rows that changed lists them with their ids, in any order until they are sorted. Without a
  // list the snapshot is of all rows, or the caller has the ids.
  std::vector<std::pair<uint32_t, int64_t>> listed;
  bool has_list = false, is_sorted = false;

 private:
  std::vector<uint64_t> bits_, moving_;
  std::vector<uint32_t> moving_rows_;   // those of moving_
  std::vector<uint64_t> moving_plans_;  // which have them
  bool moving_known_ = false;           // whether both say what moving_ has
  int64_t marked_ = 0;
  int64_t rows_;
  int64_t pending_ = 0;
  std::unordered_map<int64_t, RowColumnValues> kept_;
  bool failed_ = false;
};

}  // namespace rec_sdk
