#include "torch_npu_ext/engine/directory/row_columns.h"

#include <cstring>

namespace rec_sdk {

RowColumns::RowColumns(ColumnSet columns)
    : columns_(columns),
      words_((columns.has(Column::kCount) || columns.has(Column::kLastUse) ? 1 : 0) +
             (columns.has(Column::kClicks) ? 1 : 0) + (columns.has(Column::kTimestamp) ? 1 : 0) +
             (columns.has(Column::kScore) ? 1 : 0)),
      arrays_{ChunkedMemory(sizeof(uint32_t)), ChunkedMemory(sizeof(uint32_t)),
              ChunkedMemory(sizeof(uint64_t)), ChunkedMemory(sizeof(double)),
              ChunkedMemory(sizeof(uint32_t)), ChunkedMemory(sizeof(int64_t))} {}

void RowColumns::extend(int64_t rows) {
  for (int c = 0; c < ColumnSet::kColumns; ++c) {
    if (has(static_cast<Column>(c))) arrays_[c].extend(static_cast<size_t>(rows));
  }
}

void RowColumns::reset(int64_t row) noexcept { write(row, {}); }

void RowColumns::write(int64_t row, const RowColumnValues& values) noexcept {
  if (has(Column::kCount)) count(row) = values.count;
  if (has(Column::kLastUse)) last_use(row) = values.last_use;
  if (has(Column::kVersion)) version(row) = values.version;
  if (has(Column::kScore)) score(row) = values.score;
  if (has(Column::kClicks)) clicks(row) = values.clicks;
  if (has(Column::kTimestamp)) timestamp(row) = values.timestamp;
}

RowColumnValues RowColumns::read(int64_t row) const {
  RowColumnValues values;
  if (has(Column::kCount)) values.count = count(row);
  if (has(Column::kLastUse)) values.last_use = last_use(row);
  if (has(Column::kVersion)) values.version = version(row);
  if (has(Column::kScore)) values.score = score(row);
  if (has(Column::kClicks)) values.clicks = clicks(row);
  if (has(Column::kTimestamp)) values.timestamp = timestamp(row);
  return values;
}

void RowColumns::save(int64_t row, uint64_t* words) const noexcept {
  if (has(Column::kCount) || has(Column::kLastUse)) {
    *words++ = packed(has(Column::kCount) ? count(row) : 0, has(Column::kLastUse) ? last_use(row) : 0);
  }
  if (has(Column::kClicks)) *words++ = clicks(row);
  if (has(Column::kTimestamp)) *words++ = static_cast<uint64_t>(timestamp(row));
  if (has(Column::kScore)) std::memcpy(words++, &score(row), sizeof(double));
}

void RowColumns::restore(int64_t row, const uint64_t* words) noexcept {
  if (has(Column::kCount)) count(row) = static_cast<uint32_t>(*words >> 32);
  if (has(Column::kLastUse)) last_use(row) = static_cast<uint32_t>(*words);
  if (has(Column::kCount) || has(Column::kLastUse)) ++words;
  if (has(Column::kClicks)) clicks(row) = static_cast<uint32_t>(*words++);
  if (has(Column::kTimestamp)) timestamp(row) = static_cast<int64_t>(*words++);
  if (has(Column::kScore)) std::memcpy(&score(row), words++, sizeof(double));
}

void RowColumns::clear() {
  for (ChunkedMemory& array : arrays_) array.clear();
}

int64_t RowColumns::bytes(int64_t rows) const {
  int64_t bytes = 0;
  for (int c = 0; c < ColumnSet::kColumns; ++c) {
    if (has(static_cast<Column>(c))) bytes += rows * static_cast<int64_t>(arrays_[c].item_bytes());
  }
  return bytes;
}

}  // namespace rec_sdk
