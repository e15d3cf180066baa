// A table's snapshot, with which a save captures one moment while training continues. A row of the snapshot
// is pending until it is taken, which must happen before it changes. A pending row therefore still has its id
// and record of that moment. If its columns have changed, the snapshot keeps their former values.
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
      : bits_(static_cast<size_t>((rows + 63) / 64)),
        moving_(bits_.size()),
        known_(bits_.size(), ~uint64_t{0}),
        rows_(rows) {}

  // Returns whether the row has the id of the moment: the row was not free then, and not removed since.
  bool knows(int64_t row) const {
    return row < rows_ && (known_[static_cast<size_t>(row >> 6)] >> (row & 63) & 1) != 0;
  }
  void forget(int64_t row) noexcept {  // the row is free
    if (row < rows_) known_[static_cast<size_t>(row >> 6)] &= ~(uint64_t{1} << (row & 63));
  }
  void forget_all() noexcept { std::fill(known_.begin(), known_.end(), 0); }

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

  // Sets the moving rows: for_each(visit) visits the rows that `plans` are copying into or out of the cache.
  // Their records must not be read yet, even if they are pending. A call with the same `plans` as the
  // previous call returns at once, because visiting many moving rows would take longer than a small piece of
  // a save.
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

  // Keeps the columns of a row, which are about to change, if the row is pending.
  void keep(int64_t row, const RowColumns& columns) noexcept {
    if (!has(row)) return;
    try {
      kept_.try_emplace(row, columns.read(row));
    } catch (...) {
      failed_ = true;
    }
  }
  bool failed() const {
    return failed_;
  }  // whether memory ran out in keep(), so that the columns of rows may be wrong
  int64_t kept() const { return static_cast<int64_t>(kept_.size()); }

  // Takes a row: it is no longer pending. Returns its columns as of the moment of the snapshot. Precondition:
  // has(row). The overload without columns also requires that keep() was never called.
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

  // The rows and ids of a snapshot of changed rows, in no order until they are sorted. Other snapshots have
  // no list: they contain all rows, or rows whose ids the caller has.
  std::vector<std::pair<uint32_t, int64_t>> listed;
  bool has_list = false, is_sorted = false;

 private:
  std::vector<uint64_t> bits_, moving_, known_;
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
