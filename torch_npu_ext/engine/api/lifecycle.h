// The engine's calls on the id lifecycle: admission and eviction of ids, and the statistics that the rules
// use.
#pragma once

#include <cstdint>
#include <string>
#include <tuple>
#include <vector>

#include "torch_npu_ext/engine/api/locked_group.h"
#include "torch_npu_ext/engine/lifecycle/eviction.h"

namespace rec_sdk {

class Lifecycle : public GroupAccess {
 public:
  using GroupAccess::GroupAccess;

  void freeze(const std::vector<bool>& frozen);
  bool evicts(const std::vector<int64_t>& intervals);
  int64_t end_step(const std::vector<int64_t>& intervals);
  int64_t evict(int32_t table);
  EvictableIds evictable_ids(int32_t table, bool at_interval);
  EvictableIds evictable_ids(int32_t table, const std::vector<int64_t>& intervals);
  std::vector<int32_t> measured_tables(const std::vector<int64_t>& intervals);
  void mark_small(int32_t table, Span<int64_t> rows);
  using LargeEvictions = std::vector<std::tuple<std::string, int64_t, int64_t, int64_t>>;
  LargeEvictions take_large_evictions();

  Rules rules(int32_t table) { return this->table(table).spec().rules; }
  ColumnSet columns(int32_t table);
  std::vector<RowColumnValues> read_columns(int32_t table, Span<int64_t> rows);
  void write_columns(int32_t table, Span<int64_t> rows, const std::vector<RowColumnValues>& values);
  using Candidate = LifecycleLog::Counted;
  std::vector<Candidate> candidates(int32_t table);
  void set_candidates(int32_t table, const std::vector<Candidate>& candidates);
  std::vector<uint8_t> sketch(int32_t table);
  void set_sketch(int32_t table, const std::vector<std::vector<uint8_t>>& states);
  TableClock clock(int32_t table);
  void set_clock(int32_t table, const TableClock& clock);

 private:
  bool beyond_bound(int32_t table) const;
  bool halves(int32_t table) const;
  bool has_evictable(int32_t table, int64_t interval) const;
  void end_step_clocks();
};

}  // namespace rec_sdk
