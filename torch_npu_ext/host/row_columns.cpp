#include "torch_npu_ext/host/row_columns.h"

#include <limits>

#include "torch_npu_ext/host/group.h"
#include "torch_npu_ext/host/parallel.h"

namespace rec_sdk {
namespace {

constexpr uint32_t kMostCount = std::numeric_limits<uint32_t>::max();
constexpr int32_t kPrefetchDistance = 16;

// visit(columns, row, lookups of the row) of every unique row of tables that have some column.
template <class Visit>
void for_each_row(Group* group, const PlanBuffers& plan, const Visit& visit) noexcept {
  bool any = false;
  for (const Table& table : group->tables) any = any || !table.columns.empty();
  if (!any) return;
  const auto of_table = [&](int64_t t) noexcept {
    const Table& table = group->tables[t];
    if (table.columns.empty()) return;
    const int32_t end = plan.table_offsets[t + 1];
    for (int32_t u = plan.table_offsets[t]; u < end; ++u) {
      if (u + kPrefetchDistance < end) prefetch(&group->slot_ids[plan.unique_slots[u + kPrefetchDistance]]);
      const int32_t slot = plan.unique_slots[u];
      const uint32_t row = table.row_in(static_cast<uint32_t>(slot), group->slot_ids[slot]);
      visit(table.columns, row, static_cast<uint32_t>(plan.segment_offsets[u + 1] - plan.segment_offsets[u]));
    }
  };
  for_each_part(static_cast<int64_t>(group->tables.size()), plan.lookups, of_table);
}

}  // namespace

RowColumns::RowColumns(ColumnSet columns)
    : columns_(columns),
      arrays_{ChunkedMemory(sizeof(uint32_t)), ChunkedMemory(sizeof(uint32_t)),
              ChunkedMemory(sizeof(uint64_t)), ChunkedMemory(sizeof(float))} {}

void RowColumns::extend(int64_t rows) {
  for (int c = 0; c < 4; ++c) {
    if (has(static_cast<Column>(c))) arrays_[c].extend(static_cast<size_t>(rows));
  }
}

void RowColumns::reset(int64_t row) noexcept {
  if (has(Column::kCount)) count(row) = 0;
  if (has(Column::kLastUse)) last_use(row) = 0;
  if (has(Column::kVersion)) version(row) = 0;
  if (has(Column::kScore)) score(row) = 0;
}

RowColumnValues RowColumns::read(int64_t row) const {
  RowColumnValues values;
  if (has(Column::kCount)) values.count = count(row);
  if (has(Column::kLastUse)) values.last_use = last_use(row);
  if (has(Column::kVersion)) values.version = version(row);
  if (has(Column::kScore)) values.score = score(row);
  return values;
}

void RowColumns::clear() {
  for (ChunkedMemory& array : arrays_) array.clear();
}

int64_t RowColumns::bytes() const {
  size_t bytes = 0;
  for (const ChunkedMemory& array : arrays_) bytes += array.bytes();
  return static_cast<int64_t>(bytes);
}

void touch_columns(Group* group, const PlanBuffers& plan) noexcept {
  for_each_row(group, plan, [&](const RowColumns& columns, uint32_t row, uint32_t lookups) {
    if (columns.has(Column::kCount)) {
      uint32_t& count = columns.count(row);
      count = lookups < kMostCount - count ? count + lookups : kMostCount;
    }
    if (columns.has(Column::kLastUse)) columns.last_use(row) = static_cast<uint32_t>(plan.serial);
    if (columns.has(Column::kVersion)) columns.version(row) = plan.serial;
  });
}

void untouch_columns(Group* group, const PlanBuffers& plan) noexcept {
  for_each_row(group, plan, [](const RowColumns& columns, uint32_t row, uint32_t lookups) {
    if (!columns.has(Column::kCount)) return;
    uint32_t& count = columns.count(row);
    if (count != kMostCount) count -= lookups;
  });
}

}  // namespace rec_sdk
