#include "torch_npu_ext/engine/directory/row_columns.h"

#include <algorithm>

namespace rec_sdk {
namespace {

// The size of a chunk is a multiple of both the record size, which is a multiple of 4 bytes, and the size of
// a huge page.
size_t chunk_bytes(int32_t record_bytes) { return static_cast<size_t>(record_bytes) / 4 * kHugePage; }

}  // namespace

RowColumns::RowColumns(ColumnSet columns)
    : places_(columns), records_(std::max(4, places_.bytes()), chunk_bytes(std::max(4, places_.bytes()))) {}

void RowColumns::extend(int64_t rows) {
  if (!empty()) records_.extend(static_cast<size_t>(rows));
}

void RowColumns::reset(int64_t row) noexcept { write(row, {}); }

void RowColumns::write(int64_t row, const RowColumnValues& values) noexcept {
  if (empty()) return;
  char* const to = record(row);
  if (has(Column::kCount)) places_.set<Column::kCount>(to, values.count);
  if (has(Column::kLastUse)) places_.set<Column::kLastUse>(to, values.last_use);
  if (has(Column::kVersion)) places_.set<Column::kVersion>(to, values.version);
  if (has(Column::kScore)) places_.set<Column::kScore>(to, values.score);
  if (has(Column::kClicks)) places_.set<Column::kClicks>(to, values.clicks);
  if (has(Column::kTimestamp)) places_.set<Column::kTimestamp>(to, values.timestamp);
}

RowColumnValues RowColumns::read(int64_t row) const {
  RowColumnValues values;
  if (empty()) return values;
  const char* const from = record(row);
  if (has(Column::kCount)) values.count = places_.get<Column::kCount>(from);
  if (has(Column::kLastUse)) values.last_use = places_.get<Column::kLastUse>(from);
  if (has(Column::kVersion)) values.version = places_.get<Column::kVersion>(from);
  if (has(Column::kScore)) values.score = places_.get<Column::kScore>(from);
  if (has(Column::kClicks)) values.clicks = places_.get<Column::kClicks>(from);
  if (has(Column::kTimestamp)) values.timestamp = places_.get<Column::kTimestamp>(from);
  return values;
}

}  // namespace rec_sdk
