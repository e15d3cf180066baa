#include "torch_npu_ext/host/pending_sums.h"

#include <algorithm>

namespace rec_sdk {

PendingSums::PendingSums(int64_t dim) : sums_(static_cast<size_t>(2 * dim) * sizeof(float)) {}

void PendingSums::reserve(int64_t extra) {
  places_.reserve(extra);
  sums_.extend(static_cast<size_t>(used_ + extra));
  const size_t places = static_cast<size_t>(used_ + extra);
  if (free_.capacity() < places) free_.reserve(2 * places);  // so that free() cannot fail
}

uint32_t PendingSums::put(int32_t table, uint32_t row) {
  uint32_t place = used_;
  if (free_.empty()) {
    ++used_;
  } else {
    place = free_.back();
    free_.pop_back();
  }
  bool added = false;
  const int64_t id = key(table, row);
  places_.find_or_add(id, IdMap::hash(id), place, &added);
  sorted_valid_ = false;
  return place;
}

uint32_t PendingSums::take(int32_t table, uint32_t row) {
  const int64_t id = key(table, row);
  const uint64_t hash = IdMap::hash(id);
  const IdMap::Entry entry = places_.find(id, hash);
  if (!entry) return kNone;
  const uint32_t place = entry.row();
  places_.erase(id, hash);
  sorted_valid_ = false;
  return place;
}

void PendingSums::put_back(int32_t table, uint32_t row, uint32_t place) {
  bool added = false;
  const int64_t id = key(table, row);
  places_.find_or_add(id, IdMap::hash(id), place, &added);  // into the room that take() left
  sorted_valid_ = false;
}

const std::vector<PendingSums::Away>& PendingSums::sorted() {
  if (!sorted_valid_) {
    sorted_.clear();
    sorted_.reserve(static_cast<size_t>(places_.size()));
    places_.for_each([&](int64_t id, const IdMap::Entry& entry) { sorted_.push_back({id, entry.row()}); });
    std::sort(sorted_.begin(), sorted_.end(), [](const Away& a, const Away& b) { return a.key < b.key; });
    sorted_valid_ = true;
  }
  return sorted_;
}

void PendingSums::drop_table(int32_t table) {
  for (const Away& away : sorted()) {
    if (away.table() != table) continue;
    places_.erase(away.key, IdMap::hash(away.key));
    free(away.place);
  }
  sorted_valid_ = false;
}

void PendingSums::clear() {
  if (used_ == 0) return;
  places_.clear();
  free_.clear();
  used_ = 0;
  sorted_valid_ = false;
  ++epoch_;
}

}  // namespace rec_sdk
