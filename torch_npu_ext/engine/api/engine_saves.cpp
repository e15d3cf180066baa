// Saves need these calls beside whole tables: ids piece by piece, removed ids, open windows.
#include <algorithm>
#include <cstring>
#include <stdexcept>

#include "torch_npu_ext/engine/api/engine.h"
#include "torch_npu_ext/engine/life/removal.h"

namespace rec_sdk {

int64_t Engine::scan_ids(int32_t t, int64_t begin, int64_t least, std::vector<int64_t>* ids) {
  constexpr uint64_t kBuckets = 1024;
  const auto guard = lock_settled("listing a table");
  const Table& source = table(t);
  ids->clear();
  if (!source.spec().hashed) throw std::invalid_argument("scan_ids needs a hash table");
  const IdMap& map = source.map();
  uint64_t bucket = static_cast<uint64_t>(std::max<int64_t>(begin, 0));
  while (bucket < map.bucket_count() && static_cast<int64_t>(ids->size()) < least) {
    map.for_each_from(bucket, bucket + kBuckets,
                      [&](int64_t id, const IdMap::Entry&) { ids->push_back(id); });
    bucket += kBuckets;
  }
  return bucket < map.bucket_count() ? static_cast<int64_t>(bucket) : -1;
}

void Engine::reserve_ids(int32_t t, int64_t extra) {
  const auto guard = lock();
  if (table(t).spec().hashed) table(t).reserve_ids(std::max<int64_t>(extra, 0));
}

bool Engine::removed_ids(int32_t t, uint64_t since, std::vector<int64_t>* ids) {
  const auto guard = lock_settled("listing removed ids");
  const Table& source = table(t);
  ids->clear();
  if (!source.columns.has(Column::kVersion)) {
    throw std::invalid_argument("table '" + source.spec().name + "' does not keep versions of its rows");
  }
  const auto& log = source.removals.removed;
  const auto later = std::upper_bound(log.begin(), log.end(), since, [](uint64_t version, const auto& entry) {
    return version < entry.first;
  });
  for (auto entry = later; entry != log.end(); ++entry) ids->push_back(entry->second);
  std::sort(ids->begin(), ids->end());
  ids->erase(std::unique(ids->begin(), ids->end()), ids->end());
  return since >= source.removals.complete_after;
}

void Engine::forget_changes(int32_t t, uint64_t upto) {
  const auto guard = lock();
  table(t).changes.forget(upto);
  RemovalLog& log = table(t).removals;
  const auto later =
      std::upper_bound(log.removed.begin(), log.removed.end(), upto,
                       [](uint64_t version, const auto& entry) { return version < entry.first; });
  log.removed.erase(log.removed.begin(), later);
  shrink_removals(&log.removed);
  log.complete_after = std::max(log.complete_after, upto);
}

uint64_t Engine::next_version() {
  {
    const auto guard = lock();
    const uint64_t newest = group_.uses.newest_version();
    if (group_.uses.in_flight().empty()) group_.uses.start_at(newest);
    for (Table& table : group_.tables) table.changes.begin_epoch(newest);
  }
  return version();
}

std::vector<int64_t> Engine::window_ids(int32_t t) {
  const auto guard = lock_settled("listing the window");
  const Table& source = table(t);
  std::vector<int64_t> ids;
  for (const int32_t slot : group_.window.resident_slots()) {
    if (slot >= source.first_slot() && slot < source.end_slot()) ids.push_back(group_.slot_ids[slot]);
  }
  std::vector<std::pair<uint32_t, int64_t>> away;
  source.for_each([&](int64_t id, uint32_t row, uint32_t slot) {
    if (slot == kNoSlot && group_.window.has(t, row, -1)) away.emplace_back(row, id);
  });
  std::sort(away.begin(), away.end());
  for (const auto& row_and_id : away) ids.push_back(row_and_id.second);
  return ids;
}

void Engine::put_away(int32_t t, const int64_t* rows, int64_t count, const float* sums) {
  const auto guard = lock_settled("setting the window");
  const Table& target = table(t);
  for (int64_t i = 0; i < count; ++i) {
    if (rows[i] >= 0 && rows[i] < target.row_bound() && target.store.has(rows[i]) &&
        !group_.window.has(t, static_cast<uint32_t>(rows[i]), -1)) {
      continue;
    }
    throw std::out_of_range("table '" + target.spec().name + "': row " + std::to_string(rows[i]) +
                            " has no record outside the cache, or has sums already");
  }
  group_.window.put_away(t, rows, count, sums);
}

}  // namespace rec_sdk
