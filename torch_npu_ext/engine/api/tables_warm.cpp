// Cache warming: listing the cached rows with their heats, and bringing rows that were hot before a load into
// the cache.
#include <algorithm>
#include <functional>
#include <stdexcept>

#include "torch_npu_ext/engine/api/tables.h"
#include "torch_npu_ext/engine/lifecycle/removal.h"

namespace rec_sdk {
namespace {

// Warmed rows are recorded as used by the latest batch. If that batch is in flight, their slots would look
// pinned.
void check_idle(const Group& group, const Table& table) {
  if (group.uses.in_flight().empty()) return;
  throw std::runtime_error(
      "rows of table '" + table.spec().name +
      "' cannot be brought to the cache while batches are in flight: run their backward, "
      "with update=\"step\" step() or zero_grad() as well, or drop the outputs of their forward");
}

// Returns the slots that the next `count` rows will get, ascending. Precondition: `count` slots are free.
std::vector<int32_t> next_slots(const Table& table, size_t count) {
  std::vector<int32_t> slots(count);
  for (size_t k = 0; k < count; ++k)
    slots[k] = static_cast<int32_t>(table.peek_slot(static_cast<int64_t>(k)));
  if (!std::is_sorted(slots.begin(), slots.end())) std::sort(slots.begin(), slots.end());
  return slots;
}

}  // namespace

Tables::CachedRows Tables::cached_rows(int32_t t) {
  const auto guard = lock();
  const Table& source = table(t);
  const size_t rows = static_cast<size_t>(source.spec().slots - source.free_slots());
  const Snapshot* const saved = source.snapshot.get();
  CachedRows cached;
  auto& [ids, heats, last_batches] = cached;
  ids.reserve(rows);
  heats.reserve(rows);
  last_batches.reserve(rows);
  for (int64_t slot = source.first_slot(); slot < source.first_slot() + source.spec().slots; ++slot) {
    const uint32_t batch = group_.uses.last_batch(slot);
    const int64_t id = group_.slot_ids[slot];
    if (batch == 0) continue;
    if (saved != nullptr && !saved->knows(source.row_in(static_cast<uint32_t>(slot), id))) continue;
    ids.push_back(id);
    heats.push_back(source.policy->heat(static_cast<uint32_t>(slot), group_.uses));
    last_batches.push_back(batch);
  }
  return cached;
}

Tables::WarmRows Tables::choose_warm(int32_t t, Span<int64_t> ids) {
  const auto guard = lock_settled("warming the cache");
  const Table& target = table(t);
  check_index_ids(target, ids);
  check_idle(group_, target);
  const size_t free = static_cast<size_t>(target.free_slots());
  const int64_t count = ids.size();
  WarmRows chosen;
  auto& [places, rows, slots] = chosen;
  std::vector<bool> chosen_rows(static_cast<size_t>(target.row_bound()));
  places.reserve(std::min(free, static_cast<size_t>(count)));
  rows.reserve(places.capacity());
  constexpr int64_t kAhead = 16;
  for (int64_t i = 0; i < count && places.size() < free; ++i) {
    if (i + kAhead < count) target.prefetch_slot(ids[i + kAhead]);
    uint32_t row = 0, slot = 0;
    if (!target.locate(ids[i], &row, &slot) || slot != kNoSlot) continue;
    if ((target.spec().hashed && !target.store.has(row)) || group_.window.has(t, row, -1)) continue;
    if (chosen_rows[row]) continue;
    chosen_rows[row] = true;
    places.push_back(i);
    rows.push_back(row);
  }
  // Among equally hot rows, policies evict the lower slots first; the hottest rows therefore get the highest
  // slots.
  slots = next_slots(target, places.size());
  std::reverse(slots.begin(), slots.end());
  return chosen;
}

void Tables::warm(int32_t t, Span<int64_t> ids, Span<int32_t> slots, Span<float> heats) {
  const int64_t count = ids.size();
  if (count != slots.size() || count != heats.size()) {
    throw std::invalid_argument("warm needs a slot and a heat for every id");
  }
  const auto guard = lock_settled("warming the cache");
  Table& target = table(t);
  check_idle(group_, target);
  bool valid = count <= target.free_slots();
  if (valid) {
    std::vector<int32_t> expected = next_slots(target, static_cast<size_t>(count));
    valid = std::equal(expected.rbegin(), expected.rend(), slots.begin());
  }
  std::vector<uint32_t> rows(static_cast<size_t>(count)), taken(slots.begin(), slots.end());
  constexpr int64_t kAhead = 16;
  for (int64_t i = 0; valid && i < count; ++i) {
    if (i + kAhead < count) target.prefetch_slot(ids[i + kAhead]);
    uint32_t slot = 0;
    valid = target.locate(ids[i], &rows[static_cast<size_t>(i)], &slot) && slot == kNoSlot;
  }
  if (!valid) {
    throw std::invalid_argument("table '" + target.spec().name +
                                "': ids and slots do not match the present result of choose_warm()");
  }
  if (group_.uses.epoch() == 0) group_.uses.begin_batch(0);  // the last use of an occupied slot must not be 0
  for (int64_t i = 0; i < count; ++i) {
    const int64_t slot = slots[i];
    target.take_slot();
    target.set_slot(ids[i], taken[static_cast<size_t>(i)]);
    target.keep_row(taken[static_cast<size_t>(i)], rows[static_cast<size_t>(i)]);
    group_.slot_ids[slot] = ids[i];
    group_.uses.touch(slot);
  }
  target.policy->insert(taken.data(), rows.data(), count);
  if (!target.never_evicts()) target.policy->warm(taken.data(), heats.data(), count, group_.uses);
  if (group_.future.any()) {
    for (int64_t i = 0; i < count; ++i) group_.future.insert(t, slots[i], ids[i]);
  }
  group_.stats[t].warmed_rows += count;
}

}  // namespace rec_sdk
