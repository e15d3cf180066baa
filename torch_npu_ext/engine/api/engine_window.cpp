// The engine's calls on the accumulation window.
#include <algorithm>
#include <cstring>
#include <numeric>
#include <stdexcept>

#include "torch_npu_ext/engine/api/engine.h"

namespace rec_sdk {

void Engine::mark(const Plan& plan) { mark(plan, {plan->unique_slots, plan->uniques}); }

void Engine::mark(const Plan& plan, Span<int32_t> slots) {
  check_own(plan);
  const auto guard = lock();
  if (plan.released()) {
    throw std::runtime_error("mark needs a plan that is not released: its rows may have left the cache");
  }
  for (const int32_t slot : slots) {
    if (slot < 0 || slot >= group_.slots) throw std::out_of_range("mark: a slot that is not the group's");
  }
  for (const int32_t slot : slots) group_.window.mark(slot);
}

bool Engine::window_open() {
  const auto guard = lock();
  return !group_.window.empty();
}

Engine::WindowRows Engine::window_rows() {
  const auto guard = lock_settled("the window's rows");
  const size_t tables = group_.tables.size();
  WindowRows found{group_.window.resident_slots(), {0}, {}, std::vector<int32_t>(tables + 1)};
  const std::vector<int32_t>& slots = found.slots;
  for (const Table& table : group_.tables) {
    const auto end = std::lower_bound(slots.begin(), slots.end(), table.end_slot());
    found.slot_offsets.push_back(static_cast<int32_t>(end - slots.begin()));
  }
  for (const SpilledSums::Spilled& spilled : group_.window.spilled()) {
    found.rows.push_back(spilled.row());
    ++found.row_offsets[spilled.table() + 1];
  }
  std::partial_sum(found.row_offsets.begin(), found.row_offsets.end(), found.row_offsets.begin());
  return found;
}

namespace {

void check_spilled(int64_t begin, int64_t end, const std::vector<SpilledSums::Spilled>& spilled) {
  const int64_t size = static_cast<int64_t>(spilled.size());
  if (begin >= 0 && begin <= end && end <= size) return;
  throw std::out_of_range("rows [" + std::to_string(begin) + ", " + std::to_string(end) +
                          ") are not within the window's " + std::to_string(size));
}

}  // namespace

void Engine::read_spilled(int64_t begin, int64_t end, char* records, float* sums) {
  const auto guard = lock_settled("reading the window's rows");
  const std::vector<SpilledSums::Spilled>& spilled = group_.window.spilled();
  check_spilled(begin, end, spilled);
  const int64_t width = 2 * group_.layout.dim;
  for (int64_t i = begin; i < end; ++i, records += group_.layout.bytes, sums += width) {
    group_.tables[spilled[i].table()].store.read(spilled[i].row(), records);
    std::memcpy(sums, group_.window.sums(spilled[i].place), static_cast<size_t>(width) * sizeof(float));
  }
}

void Engine::write_spilled(int64_t begin, int64_t end, const char* records) {
  const auto guard = lock_settled("writing the window's rows");
  const std::vector<SpilledSums::Spilled>& spilled = group_.window.spilled();
  check_spilled(begin, end, spilled);
  for (int64_t i = begin; i < end; ++i, records += group_.layout.bytes) {
    group_.tables[spilled[i].table()].store.write(spilled[i].row(), records);
  }
}

void Engine::close_window() {
  const auto guard = lock_settled("the end of the window");
  const uint64_t newest = group_.uses.newest_version();
  for (Table& table : group_.tables) {
    if (!table.columns.has(Column::kVersion)) continue;
    const std::vector<int32_t>& slots = group_.window.resident_slots();
    table.changes.reserve(static_cast<int64_t>(slots.size()), table.row_bound(), newest);
    for (const int32_t slot : slots) {
      if (slot < table.first_slot() || slot >= table.end_slot()) continue;
      const int64_t id = group_.slot_ids[slot];
      const uint32_t row = table.row_in(static_cast<uint32_t>(slot), id);
      table.changes.add(id, row, table.columns.exchange_version(row, newest));
    }
  }
  for (const SpilledSums::Spilled& spilled : group_.window.spilled()) {
    Table& table = group_.tables[spilled.table()];
    if (!table.columns.has(Column::kVersion)) continue;
    const uint64_t before = table.columns.exchange_version(spilled.row(), newest);
    table.changes.add_unknown(before,
                              newest);  // matters only if a save read the version while the window was open
  }
  group_.window.close();
}

}  // namespace rec_sdk
