// Numbers that a table keeps of each row beside the record, where an option asks for them: one array per
// column, by row. Columns that no option asked for cost nothing.
#pragma once

#include <cstdint>
#include <initializer_list>

#include "torch_npu_ext/engine/base/memory.h"
#include "torch_npu_ext/engine/directory/id_map.h"

namespace rec_sdk {

enum class Column : int {
  kCount = 0,      // uint32: lookups by training batches; stays at 2^32 - 1
  kLastUse = 1,    // uint32: LifeClock::batches of the last batch that looked the row up, its low 32 bits
  kVersion = 2,    // uint64: serial of the last change, at least
  kScore = 3,      // double: what the id is worth to a table that evicts by scores
  kClicks = 4,     // uint32: of those lookups; stays at 2^32 - 1
  kTimestamp = 5,  // int64: of the last lookup that had one
};

// A set of columns.
class ColumnSet {
 public:
  static constexpr int kColumns = 6;
  constexpr ColumnSet() = default;
  constexpr ColumnSet(std::initializer_list<Column> columns) {
    for (const Column column : columns) add(column);
  }
  constexpr void add(Column column) { bits_ |= 1u << static_cast<int>(column); }
  constexpr bool has(Column column) const { return (bits_ >> static_cast<int>(column) & 1) != 0; }
  constexpr bool empty() const { return bits_ == 0; }
  constexpr bool only(Column column) const { return (bits_ & ~(1u << static_cast<int>(column))) == 0; }

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

class RowColumns {
 public:
  explicit RowColumns(ColumnSet columns);

  bool has(Column column) const { return columns_.has(column); }
  bool empty() const { return columns_.empty(); }
  bool saved() const { return !columns_.only(Column::kVersion); }  // whether saves have any

  void extend(int64_t rows);  // room for rows [0, rows), zero at first. Throws std::bad_alloc
  void reset(int64_t row) noexcept;
  void write(int64_t row, const RowColumnValues& values) noexcept;  // of the columns that there are
  RowColumnValues read(int64_t row) const;
  void clear();

  // Preconditions: the table has the column; row < the rows of extend().
  uint32_t& count(int64_t row) const { return at<uint32_t>(Column::kCount, row); }
  uint32_t& last_use(int64_t row) const { return at<uint32_t>(Column::kLastUse, row); }
  uint64_t& version(int64_t row) const { return at<uint64_t>(Column::kVersion, row); }
  double& score(int64_t row) const { return at<double>(Column::kScore, row); }
  uint32_t& clicks(int64_t row) const { return at<uint32_t>(Column::kClicks, row); }
  int64_t& timestamp(int64_t row) const { return at<int64_t>(Column::kTimestamp, row); }

  // The columns of a row before a plan, for as long as the plan can be cancelled: words() of 8 bytes.
  int64_t words() const { return words_; }
  void save(int64_t row, uint64_t* words) const noexcept;
  static uint64_t packed(uint32_t count, uint32_t last_use) {  // the only word where there are no others
    return static_cast<uint64_t>(count) << 32 | last_use;
  }
  void restore(int64_t row, const uint64_t* words) noexcept;
  REC_SDK_ALWAYS_INLINE void prefetch(int64_t row) const {
    for (int c = 0; c < ColumnSet::kColumns; ++c) {
      if (has(static_cast<Column>(c))) __builtin_prefetch(arrays_[c].at(static_cast<size_t>(row)), 0, 3);
    }
  }

  int64_t bytes(int64_t rows) const;  // of the columns of so many rows

 private:
  template <class T>
  T& at(Column column, int64_t row) const {
    return *static_cast<T*>(arrays_[static_cast<int>(column)].at(static_cast<size_t>(row)));
  }

  ColumnSet columns_;
  int64_t words_;
  ChunkedMemory arrays_[ColumnSet::kColumns];  // by Column
};

}  // namespace rec_sdk
