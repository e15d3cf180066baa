// The state of a group: tables with the same record layout that share a device cache and its plans.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "torch_npu_ext/engine/group/pending_write_backs.h"
#include "torch_npu_ext/engine/group/table.h"
#include "torch_npu_ext/engine/group/window.h"
#include "torch_npu_ext/engine/policy/future_uses.h"
#include "torch_npu_ext/engine/policy/slot_uses.h"

namespace rec_sdk {

struct Feature {
  int32_t table;
  int64_t column;  // the feature's first column in the output and its gradient; pooled groups only
  bool mean;
};

struct GroupSpec {
  std::vector<TableSpec> tables;
  RecordLayout layout;
  std::vector<Feature> features;  // ordered by table
  bool pooled;
  std::string policy;
  uint64_t serial = 0;  // the serial number before the first plan
  bool row_ids = false;
  bool origins = false;
};

// Counters of one table or of all tables. largest_batch is the largest number of unique rows of an applied
// batch. warmed_rows is the number of rows that cache warming brought into the cache.
struct Stats {
  int64_t batches = 0, lookups = 0, unique_rows = 0, unique_misses = 0, new_rows = 0;
  int64_t rows_in = 0, rows_out = 0, bytes_in = 0, bytes_out = 0, bounds_errors = 0;
  int64_t largest_batch = 0, warmed_rows = 0;
  int64_t admitted = 0, default_lookups = 0, evicted = 0;  // numbers of ids, lookups and ids
};

// The state of a group. Slots are numbered across its tables: table t has slots [tables[t].first_slot(),
// tables[t].end_slot()).
struct Group {
  explicit Group(GroupSpec spec);  // throws std::invalid_argument
  Group(const Group&) = delete;    // not copyable, because tables point to `memory`
  Group& operator=(const Group&) = delete;

  RecordLayout layout;
  std::vector<Feature> features;
  bool pooled;
  bool scaled = false;   // whether some feature is MEAN
  bool sources = false;  // whether sequences of several features have a gradient each
  bool row_ids;          // whether plans contain the ids of their rows
  bool origins;          // whether plans with rows in contain the origins of their lookups
  MemoryGuard memory;
  std::vector<Table> tables;
  int64_t slots;
  HugeArray<int64_t> slot_ids;  // [slots] the id in each used slot
  HugeArray<int32_t>
      origin_of_slot;  // [slots] the slot itself, except while a plan writes its origins; only with `origins`
  SlotUses uses;
  FutureUses future;
  Window window;
  PendingWriteBacks write_backs;
  std::vector<Stats> stats;                  // [T]
  std::vector<BoundsError> bounds_warnings;  // at most one per table
  // [T] (evicted rows, rows before) of the latest large eviction: one in which the rules that may evict any
  // number of ids evicted more than half of the table.
  std::vector<std::pair<int64_t, int64_t>> large_evictions;

  void warn_bounds(const BoundsError& error);
};

}  // namespace rec_sdk
