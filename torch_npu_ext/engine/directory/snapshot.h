// The pending rows of a table's snapshot, with which a save captures one moment while training goes on. A row
// is pending until it is taken, and a pending row must be taken before it changes. A pending row therefore
// still has its id and record of that moment; its columns too, unless their former values are kept here.
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
  void exclude(int64_t row) {
    uint64_t& word = bits_[static_cast<size_t>(row >> 6)];
    pending_ -= static_cast<int64_t>(word >> (row & 63) & 1);
    word &= ~(uint64_t{1} << (row & 63));
  }
  bool has(int64_t row) const {
    return row < rows_ && (bits_[static_cast<size_t>(row >> 6)] >> (row & 63) & 1) != 0;
  }
  int64_t pending() const { return pending_; }

  // Sets the moving rows, whose records must not be read although they are pending: the rows that
  // for_each(visit) visits, which depend only on `plans`. If `plans` are the same as in the previous call,
  // nothing is done, because a piece of a save is small and the moving rows are many.
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
  int64_t marked() const { return marked_; }  // the number of rows marked by all calls of set_moving()
  bool is_takable(int64_t row) const {
    return has(row) && (moving_[static_cast<size_t>(row >> 6)] >> (row & 63) & 1) == 0;
  }

  // Keeps the columns of a pending row, which are about to change.
  void keep(int64_t row, const RowColumns& columns) noexcept {
    if (!has(row)) return;
    try {
      kept_.try_emplace(row, columns.read(row));
    } catch (...) {
      failed_ = true;
    }
  }
  bool failed() const { return failed_; }  // out of memory: columns taken from now on are wrong
  int64_t kept() const { return static_cast<int64_t>(kept_.size()); }

  // Takes a row. Precondition: has(row). The overload without columns also requires that keep() was called
  // for no row.
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

  // The rows of a snapshot of changed rows, with their ids, unordered until they are sorted. Without a list,
  // the snapshot contains all rows, or the caller has the ids.
  std::vector<std::pair<uint32_t, int64_t>> listed;
  bool has_list = false, is_sorted = false;

 private:
  std::vector<uint64_t> bits_, moving_;
  std::vector<uint32_t> moving_rows_;   // the rows marked in moving_
  std::vector<uint64_t> moving_plans_;  // the plans that move these rows
  bool moving_known_ = false;           // whether moving_rows_ and moving_plans_ match moving_
  int64_t marked_ = 0;
  int64_t rows_;
  int64_t pending_ = 0;
  std::unordered_map<int64_t, RowColumnValues> kept_;
  bool failed_ = false;
};

}  // namespace rec_sdk
