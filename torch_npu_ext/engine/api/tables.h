// Access to whole tables. The shape of `records` is [rows, record_bytes].
#pragma once

#include <cstdint>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "torch_npu_ext/engine/api/locked_group.h"

namespace rec_sdk {

// Calls visit(name, member) for each counter that is summed over tables.
template <class Visit>
void for_each_sum(const Visit& visit) {
  visit("lookups", &Stats::lookups);
  visit("unique_rows", &Stats::unique_rows);
  visit("new_rows", &Stats::new_rows);
  visit("rows_in", &Stats::rows_in);
  visit("unique_misses", &Stats::unique_misses);
  visit("rows_out", &Stats::rows_out);
  visit("bytes_in", &Stats::bytes_in);
  visit("bytes_out", &Stats::bytes_out);
  visit("bounds_errors", &Stats::bounds_errors);
  visit("warmed_rows", &Stats::warmed_rows);
  visit("admitted", &Stats::admitted);
  visit("not_admitted_lookups", &Stats::default_lookups);
  visit("evicted", &Stats::evicted);
}

class Tables : public GroupAccess {
 public:
  using GroupAccess::GroupAccess;
  static constexpr int32_t kAllTables = -1;
  using RowsAndSlots = std::pair<std::vector<int64_t>, std::vector<int32_t>>;

  int64_t row_count(int32_t table);
  using Rows = std::tuple<std::vector<int64_t>, std::vector<int32_t>, std::vector<int64_t>>;
  Rows rows(int32_t table);
  RowsAndSlots find_rows(int32_t table, Span<int64_t> ids);

  RowsAndSlots insert(int32_t table, Span<int64_t> ids);
  void reserve_rows(int32_t table, Span<int64_t> rows);
  void read_rows(int32_t table, Span<int64_t> ids, Span<int64_t> rows, char* records);
  void write_rows(int32_t table, Span<int64_t> ids, Span<int64_t> rows, const char* records);
  void initial_records(int32_t table, Span<int64_t> ids, char* records);
  int64_t remove(int32_t table, Span<int64_t> ids, bool candidates = true);
  void clear(int32_t table);

  using CachedRows = std::tuple<std::vector<int64_t>, std::vector<float>, std::vector<uint32_t>>;
  CachedRows cached_rows(int32_t table);
  // Skips ids of hash tables without a record in the host store, and rows that have spilled sums.
  using WarmRows = std::tuple<std::vector<int64_t>, std::vector<int64_t>, std::vector<int32_t>>;
  WarmRows choose_warm(int32_t table, Span<int64_t> ids);
  // Throws std::invalid_argument if the table changed since choose_warm().
  void warm(int32_t table, Span<int64_t> ids, Span<int32_t> slots, Span<float> heats);

  struct Memory {
    int64_t index_bytes, store_bytes, disk_bytes, column_bytes, rows, candidates, candidate_bytes;
  };
  Memory memory(int32_t table = kAllTables);
  void set_memory_limit(int64_t bytes);
  Stats stats(int32_t table = kAllTables);
  int64_t pinned(int32_t table = kAllTables);
  void reset_stats();
  using BoundsWarnings = std::vector<std::tuple<std::string, int64_t, int64_t>>;
  BoundsWarnings take_bounds_warnings();

 private:
  std::pair<int32_t, int32_t> range(int32_t table);  // the range [first, end) of one table or of all tables
};

}  // namespace rec_sdk
