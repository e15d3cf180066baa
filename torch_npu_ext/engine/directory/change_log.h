// A log of the changed rows of a table, for delta saves. A new epoch begins with each version that a save
// fixes, and the log lists a changed row, with its id, once per epoch. A later save finds the changes after
// that version without examining unchanged rows.
#pragma once

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

#include "torch_npu_ext/engine/base/radix_sort.h"

namespace rec_sdk {

class ChangeLog {
 public:
  static constexpr int64_t kLeast = 4096;  // the log may always have this many entries
  static constexpr int64_t kShare =
      8;  // with more than 1/8 of the table's rows in the log, examining all rows is as fast

  // Returns whether the log contains all rows that changed after version `since`.
  bool knows(uint64_t since) const { return since >= complete_after_; }

  // Begins an epoch. No row has a later version than `newest`.
  void begin_epoch(uint64_t newest) {
    if (newest == start_) return;
    start_ = newest;
    if (epochs_.back().second == ids_.size()) epochs_.pop_back();
    epochs_.emplace_back(newest, ids_.size());
  }

  // Reserves space for `count` more entries; `rows` is the number of rows of the table. If the log would
  // become too long, it is cleared. Throws std::bad_alloc.
  void reserve(int64_t count, int64_t rows, uint64_t newest) {
    const int64_t most = std::max(kLeast, rows / kShare);
    if (static_cast<int64_t>(ids_.size()) + count > most) clear(newest);
    const size_t needed = ids_.size() + static_cast<size_t>(count);
    if (needed > ids_.capacity() || needed > rows_.capacity()) {
      const size_t more = std::max(needed, 2 * ids_.capacity());
      ids_.reserve(more);
      rows_.reserve(more);
    }
  }

  // Returns whether add() would log a row whose version is `before`.
  bool wants(uint64_t before) const { return before <= start_; }
  // Logs a changed row, whose version was `before` until now, unless the log lists it for this epoch.
  // Precondition: reserve().
  void add(int64_t id, uint32_t row, uint64_t before) noexcept {
    if (wants(before)) add(id, row);
  }
  void add(int64_t id, uint32_t row) noexcept {  // logs the row without checking wants()
    ids_.push_back(id);
    rows_.push_back(row);
  }

  // Records the change of a row whose id is unknown. If the row would have to be logged, the log is cleared.
  void add_unknown(uint64_t before, uint64_t newest) {
    if (before <= start_) clear(newest);
  }

  // Drops all changes. No row has a later version than `newest`.
  void clear(uint64_t newest) {
    ids_.clear();
    rows_.clear();
    epochs_.assign(1, {newest, 0});
    start_ = complete_after_ = newest;
  }

  // Drops the changes of epochs that ended at version `upto` or earlier.
  void forget(uint64_t upto) {
    const auto kept = epoch_of(upto);
    if (kept == epochs_.begin()) return;
    const size_t dropped = kept->second;
    ids_.erase(ids_.begin(), ids_.begin() + static_cast<int64_t>(dropped));
    rows_.erase(rows_.begin(), rows_.begin() + static_cast<int64_t>(dropped));
    epochs_.erase(epochs_.begin(), kept);
    for (auto& epoch : epochs_) epoch.second -= dropped;
    complete_after_ = epochs_.front().first;
  }

  int64_t bytes() const {
    return static_cast<int64_t>(ids_.capacity() * sizeof(int64_t) + rows_.capacity() * sizeof(uint32_t));
  }

  // Log entries, oldest first: ids and their rows, with repetitions. If the id was removed since, the row is
  // free, or a later entry has its present id.
  struct Entries {
    const int64_t* ids;
    const uint32_t* rows;
    int64_t count;
  };
  // Returns the entries from which ids_after() is computed. Valid until the next change.
  Entries entries_after(uint64_t since) const {
    const size_t first = epoch_of(since)->second;
    return {ids_.data() + first, rows_.data() + first, static_cast<int64_t>(ids_.size() - first)};
  }

  // Returns distinct ids, ascending, which include the ids of all rows that changed after version `since`.
  // Precondition: knows(since).
  std::vector<int64_t> ids_after(uint64_t since) const {
    std::vector<int64_t> ids(ids_.begin() + static_cast<int64_t>(epoch_of(since)->second), ids_.end());
    constexpr uint64_t kSign = uint64_t{1} << 63;
    radix_sort(&ids, [](int64_t id) { return static_cast<uint64_t>(id) ^ kSign; });
    ids.erase(std::unique(ids.begin(), ids.end()), ids.end());
    return ids;
  }

 private:
  using Epoch = std::pair<uint64_t, size_t>;  // the latest version when it began, and its first entry

  // Returns the epoch that contains changes just after version `since`: the last one that begins at that
  // version or earlier.
  std::vector<Epoch>::const_iterator epoch_of(uint64_t since) const {
    const auto next =
        std::upper_bound(epochs_.begin(), epochs_.end(), since,
                         [](uint64_t version, const Epoch& epoch) { return version < epoch.first; });
    return next == epochs_.begin() ? next : next - 1;
  }

  std::vector<int64_t> ids_;
  std::vector<uint32_t> rows_;         // the row of each id of ids_
  std::vector<Epoch> epochs_{{0, 0}};  // oldest first
  uint64_t start_ = 0;                 // latest version when the latest epoch began
  uint64_t complete_after_ = 0;
};

}  // namespace rec_sdk
