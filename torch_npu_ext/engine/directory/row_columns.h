// Numbers that a table keeps of each row beside its weights, where an option asks for them: one short record
// per row, so that a batch finds all numbers of a row in one cache line. Columns that no option asked for
// cost nothing.
#pragma once

#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <type_traits>

#include "torch_npu_ext/engine/base/memory.h"
#include "torch_npu_ext/engine/directory/id_map.h"

namespace rec_sdk {

enum class Column : int {
  kCount = 0,      // uint32: lookups by training batches; stays at 2^32 - 1
  kLastUse = 1,    // uint32: TableClock::batches of the last batch that looked the row up, its low 32 bits
  kVersion = 2,    // uint64: serial of the last change, at least
  kScore = 3,      // double: what the id is worth to a table that evicts by scores
  kClicks = 4,     // uint32: of those lookups; stays at 2^32 - 1
  kTimestamp = 5,  // int64: of the last lookup that had one
};

template <Column column>
using ColumnNumber = std::conditional_t<
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
  constexpr bool has(ColumnSet columns) const { return (columns.bits_ & ~bits_) == 0; }  // all of them
  constexpr bool empty() const { return bits_ == 0; }
  constexpr uint32_t bits() const { return bits_; }  // bit c: column c
  static constexpr ColumnSet of_bits(uint32_t bits) {
    ColumnSet columns;
    columns.bits_ = bits;
    return columns;
  }

 private:
  uint32_t bits_ = 0;
};

// The columns of one row; one that the table does not have reads as 0.
struct RowColumnValues {
  uint32_t count = 0, last_use = 0;
  uint64_t version = 0;
  double score = 0;
  uint32_t clicks = 0;
  int64_t timestamp = 0;
};

// Where the columns of a row are in its record: without gaps, so at addresses that need not be aligned. The
// version is the last: a plan that is cancelled puts back all that is before it.
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
  constexpr int32_t bytes() const { return bytes_; }                // of a record, a multiple of 4
  constexpr int32_t undone_bytes() const { return undone_bytes_; }  // of those before the version

  // Precondition: has(column).
  template <Column column>
  REC_SDK_ALWAYS_INLINE ColumnNumber<column> get(const char* record) const {
    ColumnNumber<column> number;
    std::memcpy(&number, record + places_[static_cast<int>(column)], sizeof(number));
    return number;
  }
  template <Column column>
  REC_SDK_ALWAYS_INLINE void set(char* record, ColumnNumber<column> number) const {
    std::memcpy(record + places_[static_cast<int>(column)], &number, sizeof(number));
  }

 private:
  template <Column column>
  constexpr void append() {
    if (!has(column)) return;
    places_[static_cast<int>(column)] = bytes_;
    bytes_ += static_cast<int32_t>(sizeof(ColumnNumber<column>));
  }

  ColumnSet columns_;
  int32_t bytes_ = 0, undone_bytes_ = 0;
  int32_t places_[ColumnSet::kColumns] = {};  // by Column
};

class RowColumns {
 public:
  explicit RowColumns(ColumnSet columns);

  const ColumnPlaces& places() const { return places_; }
  bool has(Column column) const { return places_.has(column); }
  bool empty() const { return places_.empty(); }
  bool saved() const { return places_.undone_bytes() > 0; }  // whether saves have any: all but the version

  void extend(int64_t rows);  // room for rows [0, rows), zero at first. Throws std::bad_alloc
  void reset(int64_t row) noexcept;
  void write(int64_t row, const RowColumnValues& values) noexcept;  // of the columns that there are
  RowColumnValues read(int64_t row) const;
  void clear() { records_.clear(); }

  // Preconditions of these: some column is kept; row < the rows of extend().
  REC_SDK_ALWAYS_INLINE char* record(int64_t row) const {
    return static_cast<char*>(records_.at(static_cast<size_t>(row)));
  }
  uint64_t version(int64_t row) const { return places_.get<Column::kVersion>(record(row)); }
  uint64_t exchange_version(int64_t row, uint64_t version) noexcept {  // the one before
    const uint64_t before = this->version(row);
    places_.set<Column::kVersion>(record(row), version);
    return before;
  }

  int64_t bytes(int64_t rows) const { return rows * places_.bytes(); }  // of the columns of so many rows

 private:
  ColumnPlaces places_;
  ChunkedMemory records_;
};

}  // namespace rec_sdk
