// The state of a group: tables of one record layout that share a device cache and a plan.
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
  int64_t column;  // of its first output in the gradient; pooled groups
  bool mean;
};

struct GroupSpec {
  std::vector<TableSpec> tables;
  RecordLayout layout;
  std::vector<Feature> features;  // ordered by table
  bool pooled;
  std::string policy;
  uint64_t serial = 0;  // of the plan before the first
  bool row_ids = false;
  bool origins = false;
};

// Counts of one table, or of all. largest_batch is of those that began: the most unique rows of one.
// warmed_rows came to the cache for no batch.
struct Stats {
  int64_t batches = 0, lookups = 0, unique_rows = 0, unique_misses = 0, new_rows = 0;
  int64_t rows_in = 0, rows_out = 0, bytes_in = 0, bytes_out = 0, bounds_errors = 0;
  int64_t largest_batch = 0, warmed_rows = 0;
  int64_t admitted = 0, default_lookups = 0, evicted = 0;  // ids, lookups, ids
};

// Slot numbers are the group's: table t has [tables[t].first_slot(), tables[t].end_slot()).
struct Group {
  explicit Group(GroupSpec spec);  // throws std::invalid_argument
  Group(const Group&) = delete;    // tables point to `memory`
  Group& operator=(const Group&) = delete;

  RecordLayout layout;
  std::vector<Feature> features;
  bool pooled;
  bool scaled = false;   // some feature is MEAN
  bool sources = false;  // a sequence of several features, each with a gradient of its own
  bool row_ids;          // plans have the ids of their rows
  bool origins;          // plans that bring rows in say where each lookup's row is before they do
  MemoryGuard memory;
  std::vector<Table> tables;
  int64_t slots;
  HugeArray<int64_t> slot_ids;        // [slots] of a used slot
  HugeArray<int32_t> origin_of_slot;  // [slots] its own number, but while a plan is made; only with `origins`
  SlotUses uses;
  FutureUses future;
  Window window;
  PendingWriteBacks write_backs;
  std::vector<Stats> stats;                  // [T]
  std::vector<BoundsError> bounds_warnings;  // one per table at most
  // [T] (rows that left, of so many) of the latest that took more than half of a table, and more than it was
  // asked for.
  std::vector<std::pair<int64_t, int64_t>> large_evictions;

  void warn_bounds(const BoundsError& error);
};

}  // namespace rec_sdk
