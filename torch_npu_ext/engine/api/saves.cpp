// The engine's calls for saves: listing ids, versions, loading rows and the accumulation window.
#include "torch_npu_ext/engine/api/saves.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>

#include "torch_npu_ext/engine/base/radix_sort.h"
#include "torch_npu_ext/engine/lifecycle/removal.h"

namespace rec_sdk {
namespace {

std::vector<int64_t> sorted_by_row(std::vector<std::pair<uint32_t, int64_t>> found) {
  radix_sort(&found, [](const auto& row_and_id) -> uint64_t { return row_and_id.first; });
  std::vector<int64_t> ids;
  ids.reserve(found.size());
  for (const auto& row_and_id : found) ids.push_back(row_and_id.second);
  return ids;
}

// Returns the ids for which selects(id, row, slot) is true, by ascending row.
template <class Selects>
std::vector<int64_t> ids_by_row(const Table& table, const Selects& wanted) {
  std::vector<std::pair<uint32_t, int64_t>> found;
  table.for_each([&](int64_t id, uint32_t row, uint32_t slot) {
    if (wanted(id, row, slot)) found.emplace_back(row, id);
  });
  return sorted_by_row(std::move(found));
}

// Like the function above, but examines only `ids` and skips unknown ones.
template <class Selects>
std::vector<int64_t> ids_by_row(const Table& table, const std::vector<int64_t>& ids, const Selects& selects) {
  constexpr size_t kAhead = 16;
  std::vector<std::pair<uint32_t, int64_t>> found;
  uint32_t row = 0, slot = 0;
  for (size_t i = 0; i < ids.size(); ++i) {
    if (i + kAhead < ids.size()) table.prefetch_slot(ids[i + kAhead]);
    if (table.locate(ids[i], &row, &slot) && selects(ids[i], row, slot)) found.emplace_back(row, ids[i]);
  }
  return sorted_by_row(std::move(found));
}

}  // namespace

std::vector<int64_t> Saves::ids_with_records(int32_t t) {
  const auto guard = lock_settled("listing a table");
  const Table& source = table(t);
  return ids_by_row(
      source, [&](int64_t, uint32_t row, uint32_t slot) { return slot != kNoSlot || source.store.has(row); });
}

std::vector<int64_t> Saves::unlisted_ids(int32_t t, Span<int64_t> ids) {
  const auto guard = lock_settled("listing a table");
  const Table& source = table(t);
  IdMap listed(ids.size());
  for (const int64_t id : ids) {
    bool added = false;
    listed.reserve(1);
    listed.find_or_add(id, IdMap::hash(id), 0, &added);
  }
  return ids_by_row(source,
                    [&](int64_t id, uint32_t, uint32_t) { return !listed.find(id, IdMap::hash(id)); });
}

std::pair<std::vector<int64_t>, int64_t> Saves::changed_ids(int32_t t, uint64_t since) {
  const auto guard = lock_settled("listing a table");
  const Table& source = versioned_table(t);
  int64_t examined = 0;
  const auto changed = [&](int64_t, uint32_t row, uint32_t) {
    ++examined;
    return source.columns.version(row) > since;
  };
  std::vector<int64_t> ids = source.changes.knows(since)
                                 ? ids_by_row(source, source.changes.ids_after(since), changed)
                                 : ids_by_row(source, changed);
  return {std::move(ids), examined};
}

// Rows of a batch in flight already have the batch's version, although they have not been updated yet. The
// present version is therefore the one before the oldest batch in flight.
uint64_t Saves::version() {
  const auto guard = lock();
  const auto& in_flight = group_.uses.in_flight();
  return in_flight.empty() ? group_.uses.serial() : in_flight.front()->serial - 1;
}

std::pair<std::vector<int64_t>, int64_t> Saves::scan_ids(int32_t t, int64_t begin, int64_t least) {
  constexpr uint64_t kBuckets = 1024;
  const auto guard = lock_settled("listing a table");
  const Table& source = table(t);
  if (!source.spec().hashed) throw std::invalid_argument("scan_ids needs a hash table");
  std::vector<int64_t> ids;
  const IdMap& map = source.map();
  uint64_t bucket = static_cast<uint64_t>(std::max<int64_t>(begin, 0));
  while (bucket < map.bucket_count() && static_cast<int64_t>(ids.size()) < least) {
    map.for_each_from(bucket, bucket + kBuckets, [&](int64_t id, const IdMap::Entry&) { ids.push_back(id); });
    bucket += kBuckets;
  }
  return {std::move(ids), bucket < map.bucket_count() ? static_cast<int64_t>(bucket) : -1};
}

void Saves::reserve_ids(int32_t t, int64_t extra) {
  const auto guard = lock();
  if (table(t).spec().hashed) table(t).reserve_ids(std::max<int64_t>(extra, 0));
}

std::pair<std::vector<int64_t>, bool> Saves::removed_ids(int32_t t, uint64_t since) {
  const auto guard = lock_settled("listing removed ids");
  const Table& source = versioned_table(t);
  std::vector<int64_t> ids;
  const auto& log = source.removals.removed;
  const auto first = std::upper_bound(log.begin(), log.end(), since, [](uint64_t version, const auto& entry) {
    return version < entry.first;
  });
  for (auto entry = first; entry != log.end(); ++entry) ids.push_back(entry->second);
  std::sort(ids.begin(), ids.end());
  ids.erase(std::unique(ids.begin(), ids.end()), ids.end());
  return {std::move(ids), since >= source.removals.complete_after};
}

void Saves::forget_changes(int32_t t, uint64_t upto) {
  const auto guard = lock();
  table(t).changes.forget(upto);
  RemovalLog& log = table(t).removals;
  const auto first =
      std::upper_bound(log.removed.begin(), log.removed.end(), upto,
                       [](uint64_t version, const auto& entry) { return version < entry.first; });
  log.removed.erase(log.removed.begin(), first);
  shrink_removals(&log.removed);
  log.complete_after = std::max(log.complete_after, upto);
}

uint64_t Saves::next_version() {
  {
    const auto guard = lock();
    const uint64_t newest = group_.uses.newest_version();
    if (group_.uses.in_flight().empty()) group_.uses.start_at(newest);
    for (Table& table : group_.tables) table.changes.begin_epoch(newest);
  }
  return version();
}

std::vector<int64_t> Saves::load_rows(int32_t t, Span<int64_t> ids, const std::vector<RecordPart>& parts,
                                      bool whole) {
  constexpr int64_t kPieceBytes = int64_t{256} << 10;  // small enough for the cache of a core
  std::vector<int64_t> rows = tables_.insert(t, ids).first;
  const int64_t count = ids.size(), bytes = group_.layout.bytes;
  if (whole && parts.size() == 1 && parts[0].bytes == bytes) {
    tables_.write_rows(t, ids, rows, parts[0].values);
    return rows;
  }
  const int64_t most = std::min(count, std::max<int64_t>(1, kPieceBytes / bytes));
  std::vector<char> records(static_cast<size_t>(most * bytes));
  for (int64_t begin = 0; begin < count; begin += most) {
    const int64_t some = std::min(most, count - begin);
    const Span<int64_t> some_ids(ids.data() + begin, some), some_rows(rows.data() + begin, some);
    if (!whole) tables_.read_rows(t, some_ids, some_rows, records.data());
    for (const RecordPart& part : parts) {
      const char* values = part.values + begin * part.bytes;
      char* record = records.data() + part.begin;
      for (int64_t i = 0; i < some; ++i, values += part.bytes, record += bytes) {
        std::memcpy(record, values, static_cast<size_t>(part.bytes));
      }
    }
    tables_.write_rows(t, some_ids, some_rows, records.data());
  }
  return rows;
}

std::vector<int64_t> Saves::window_ids(int32_t t) {
  const auto guard = lock_settled("listing the window");
  const Table& source = table(t);
  std::vector<int64_t> ids;
  for (const int32_t slot : group_.window.resident_slots()) {
    if (slot >= source.first_slot() && slot < source.end_slot()) ids.push_back(group_.slot_ids[slot]);
  }
  std::vector<std::pair<uint32_t, int64_t>> spilled;
  source.for_each([&](int64_t id, uint32_t row, uint32_t slot) {
    if (slot == kNoSlot && group_.window.has(t, row, -1)) spilled.emplace_back(row, id);
  });
  std::sort(spilled.begin(), spilled.end());
  for (const auto& row_and_id : spilled) ids.push_back(row_and_id.second);
  return ids;
}

void Saves::put_spilled(int32_t t, Span<int64_t> rows, const float* sums) {
  const auto guard = lock_settled("setting the window");
  const Table& target = table(t);
  for (const int64_t row : rows) {
    if (row >= 0 && row < target.row_bound() && target.store.has(row) &&
        !group_.window.has(t, static_cast<uint32_t>(row), -1)) {
      continue;
    }
    throw std::out_of_range("table '" + target.spec().name + "': row " + std::to_string(row) +
                            " has no record outside the cache, or has sums already");
  }
  group_.window.put_spilled(t, rows.data(), rows.size(), sums);
}

}  // namespace rec_sdk
