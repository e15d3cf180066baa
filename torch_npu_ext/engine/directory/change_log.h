// Which rows of a table changed, for saves of changes: each id once for every epoch in which its row
// changed. An epoch begins when a save asks for a version that later changes are to be later than, so that
// its changes are found without a look at the rows that stayed as they were.
#pragma once

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

#include "torch_npu_ext/engine/base/radix_sort.h"

namespace rec_sdk {

class ChangeLog {
 public:
  static constexpr int64_t kLeast = 4096;  // entries that there is always room for
  static constexpr int64_t kShare = 8;  // of a table's rows: with more entries a look at all rows is as good

  // Whether the log has the ids of all rows that are of a later version than `since`.
  bool knows(uint64_t since) const { return since >= complete_after_; }

  // No row is of a later version than `newest`.
  void begin_epoch(uint64_t newest) {
    if (newest == start_) return;
    start_ = newest;
    if (epochs_.back().second == ids_.size()) epochs_.pop_back();
    epochs_.emplace_back(newest, ids_.size());
  }

  // Room for `count` entries of a table of `rows` rows; where there are too many, all that was known is
  // forgotten. Throws std::bad_alloc
  void reserve(int64_t count, int64_t rows, uint64_t newest) {
    const int64_t most = std::max(kLeast, rows / kShare);
    if (static_cast<int64_t>(ids_.size()) + count > most) clear(newest);
    const size_t needed = ids_.size() + static_cast<size_t>(count);
    if (needed > ids_.capacity()) ids_.reserve(std::max(needed, 2 * ids_.capacity()));
  }

  // Whether add() of a row of version `before` would do anything.
  bool wants(uint64_t before) const { return before <= start_; }
  // A row of version `before` changes. Precondition: reserve().
  void add(int64_t id, uint64_t before) noexcept {
    if (wants(before)) add(id);
  }
  void add(int64_t id) noexcept { ids_.push_back(id); }  // of a row that it wants

  // A row changes, and its id is not known.
  void add_unknown(uint64_t before, uint64_t newest) {
    if (before <= start_) clear(newest);
  }

  // Nothing of before is known. No row is of a later version than `newest`.
  void clear(uint64_t newest) {
    ids_.clear();
    epochs_.assign(1, {newest, 0});
    start_ = complete_after_ = newest;
  }

  // Forgets what changed before the version `upto`.
  void forget(uint64_t upto) {
    const auto kept = epoch_of(upto);
    if (kept == epochs_.begin()) return;
    const size_t gone = kept->second;
    ids_.erase(ids_.begin(), ids_.begin() + static_cast<int64_t>(gone));
    epochs_.erase(epochs_.begin(), kept);
    for (auto& epoch : epochs_) epoch.second -= gone;
    complete_after_ = epochs_.front().first;
  }

  int64_t bytes() const { return static_cast<int64_t>(ids_.capacity() * sizeof(int64_t)); }

  // The ids of ids_after() as they are here: in no order, some more than once. Void after the next change.
  std::pair<const int64_t*, const int64_t*> entries_after(uint64_t since) const {
    return {ids_.data() + epoch_of(since)->second, ids_.data() + ids_.size()};
  }

  // Ascending, each once: ids that were rows of a later version than `since`, and others. Precondition:
  // knows(since).
  std::vector<int64_t> ids_after(uint64_t since) const {
    std::vector<int64_t> ids(ids_.begin() + static_cast<int64_t>(epoch_of(since)->second), ids_.end());
    constexpr uint64_t kSign = uint64_t{1} << 63;
    radix_sort(&ids, [](int64_t id) { return static_cast<uint64_t>(id) ^ kSign; });
    ids.erase(std::unique(ids.begin(), ids.end()), ids.end());
    return ids;
  }

 private:
  using Epoch = std::pair<uint64_t, size_t>;  // no row was of a later version when it began; its first entry

  // The earliest epoch in which a row can have become of a later version than `since`: the versions of an
  // epoch end where the next begins.
  std::vector<Epoch>::const_iterator epoch_of(uint64_t since) const {
    const auto later =
        std::upper_bound(epochs_.begin(), epochs_.end(), since,
                         [](uint64_t version, const Epoch& epoch) { return version < epoch.first; });
    return later == epochs_.begin() ? later : later - 1;
  }

  std::vector<int64_t> ids_;
  std::vector<Epoch> epochs_{{0, 0}};  // oldest first
  uint64_t start_ = 0;                 // of the latest epoch
  uint64_t complete_after_ = 0;
};

}  // namespace rec_sdk
