// Columns: statistics that a table keeps for each row in addition to its record, if an option requires them.
// All columns of a row are adjacent, so that a batch finds them in one cache line. Unused columns take no
// memory.
#pragma once

#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <type_traits>

#include "torch_npu_ext/engine/base/memory.h"
#include "torch_npu_ext/engine/directory/id_map.h"

namespace rec_sdk {

enum class Column : int {
  kCount = 0,      // uint32: number of lookups by training batches; saturates at 2^32 - 1
  kLastUse = 1,    // uint32: the low 32 bits of TableClock::batches at the last batch that looked the row up
  kVersion = 2,    // uint64: an upper bound of the serial number of the last plan that changed the row
  kScore = 3,      // double: the score of an id in a table that evicts by scores
  kClicks = 4,     // uint32: number of clicks of these lookups; saturates at 2^32 - 1
  kTimestamp = 5,  // int64: timestamp of the last lookup that had one
};

template <Column column>
using ColumnType = std::conditional_t<
    column == Column::kVersion, uint64_t,
    std::conditional_t<column == Column::kScore, double,
                       std::conditional_t<column == Column::kTimestamp, int64_t, uint32_t>>>;

// A set of columns.
class ColumnSet {
 public:
  static constexpr int kColumns = 6;
  constexpr ColumnSet() = default;
  constexpr ColumnSet(std::initializer_list<Column> columns) {
    for (const Column column : columns) add(column);
  }
  constexpr void add(Column column) { bits_ |= 1u << static_cast<int>(column); }
  constexpr void add(ColumnSet columns) { bits_ |= columns.bits_; }
  constexpr bool has(Column column) const { return (bits_ >> static_cast<int>(column) & 1) != 0; }
  constexpr bool has(ColumnSet columns) const {
    return (columns.bits_ & ~bits_) == 0;
  }  // whether this set contains all of `columns`
  constexpr bool empty() const { return bits_ == 0; }
  constexpr uint32_t bits() const { return bits_; }  // bit c is set for column c
  static constexpr ColumnSet of_bits(uint32_t bits) {
    ColumnSet columns;
    columns.bits_ = bits;
    return columns;
  }

 private:
  uint32_t bits_ = 0;
};

// The values of the columns of one row; 0 for columns that the table does not keep.
struct RowColumnValues {
  uint32_t count = 0, last_use = 0;
  uint64_t version = 0;
  double score = 0;
  uint32_t clicks = 0;
  int64_t timestamp = 0;
};

// The positions of the columns within the columns of a row. There are no gaps, so columns may be unaligned.
// The version is last, because cancelling a plan restores all columns except the version.
class ColumnPlaces {
 public:
  constexpr explicit ColumnPlaces(ColumnSet columns) : columns_(columns) {
    append<Column::kCount>();
    append<Column::kLastUse>();
    append<Column::kScore>();
    append<Column::kClicks>();
    append<Column::kTimestamp>();
    undone_bytes_ = bytes_;
    append<Column::kVersion>();
  }

  constexpr ColumnSet columns() const { return columns_; }
  constexpr bool has(Column column) const { return columns_.has(column); }
  constexpr bool empty() const { return columns_.empty(); }
  constexpr int32_t bytes() const { return bytes_; }                // bytes of a record, a multiple of 4
  constexpr int32_t undone_bytes() const { return undone_bytes_; }  // bytes of the columns before the version

  // Precondition: has(column).
  template <Column column>
  REC_SDK_ALWAYS_INLINE ColumnType<column> get(const char* record) const {
    ColumnType<column> number;
    std::memcpy(&number, record + places_[static_cast<int>(column)], sizeof(number));
    return number;
  }
  template <Column column>
  REC_SDK_ALWAYS_INLINE void set(char* record, ColumnType<column> number) const {
    std::memcpy(record + places_[static_cast<int>(column)], &number, sizeof(number));
  }

 private:
  template <Column column>
  constexpr void append() {
    if (!has(column)) return;
    places_[static_cast<int>(column)] = bytes_;
    bytes_ += static_cast<int32_t>(sizeof(ColumnType<column>));
  }

  ColumnSet columns_;
  int32_t bytes_ = 0, undone_bytes_ = 0;
  int32_t places_[ColumnSet::kColumns] = {};  // indexed by Column
};

// The columns of all rows of a table.
class RowColumns {
 public:
  explicit RowColumns(ColumnSet columns);

  const ColumnPlaces& places() const { return places_; }
  bool has(Column column) const { return places_.has(column); }
  bool empty() const { return places_.empty(); }
  bool saved() const {
    return places_.undone_bytes() > 0;
  }  // whether saves contain any of these columns, which is any but the version

  void extend(int64_t rows);  // adds zeroed records for rows [0, rows); throws std::bad_alloc
  void reset(int64_t row) noexcept;
  void write(int64_t row, const RowColumnValues& values) noexcept;  // writes the columns that are kept
  RowColumnValues read(int64_t row) const;
  void clear() { records_.clear(); }

  // Preconditions of the following calls: the table keeps a column, and extend() was called for more than
  // `row` rows.
  REC_SDK_ALWAYS_INLINE char* record(int64_t row) const {
    return static_cast<char*>(records_.at(static_cast<size_t>(row)));
  }
  uint64_t version(int64_t row) const { return places_.get<Column::kVersion>(record(row)); }
  uint64_t exchange_version(int64_t row, uint64_t version) noexcept {  // returns the former version
    const uint64_t before = this->version(row);
    places_.set<Column::kVersion>(record(row), version);
    return before;
  }

  int64_t bytes(int64_t rows) const { return rows * places_.bytes(); }  // bytes of the columns of `rows` rows

 private:
  ColumnPlaces places_;
  ChunkedMemory records_;
};

}  // namespace rec_sdk
