// The state of a group: tables of one record layout that share a device cache and a plan.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "torch_npu_ext/host/pending_sums.h"
#include "torch_npu_ext/host/slot_uses.h"
#include "torch_npu_ext/host/table.h"

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
};

struct Stats {
  int64_t batches = 0, lookups = 0, unique_rows = 0, unique_misses = 0, new_rows = 0;
  int64_t rows_in = 0, rows_out = 0, bytes_in = 0, bytes_out = 0, bounds_errors = 0;
};

struct BoundsError {
  int32_t table;
  int64_t count;
  int64_t example;
};

// Slot numbers are the group's: table t has [tables[t].first_slot(), tables[t].end_slot()).
struct Group {
  explicit Group(GroupSpec spec);  // throws std::invalid_argument
  Group(const Group&) = delete;    // tables point to `memory`
  Group& operator=(const Group&) = delete;

  RecordLayout layout;
  std::vector<Feature> features;
  bool pooled;
  bool scaled = false;  // some feature is MEAN
  MemoryGuard memory;
  std::vector<Table> tables;
  int64_t slots = 0;
  HugeArray<int64_t> slot_ids;  // [slots] of a used slot
  SlotUses uses;
  HugeArray<uint8_t> pending_flags;    // [slots] the row has pending gradients
  int64_t pending_resident = 0;        // flags set
  std::vector<int32_t> pending_slots;  // all of those; some twice, some whose flag was taken back
  PendingSums pending;
  Stats stats;
  std::vector<BoundsError> bounds_warnings;  // one per table at most

  // Allocates nothing after reserve_pending.
  void set_pending(int64_t slot, bool value) {
    if (value && pending_flags[slot] == 0) pending_slots.push_back(static_cast<int32_t>(slot));
    pending_resident += static_cast<int64_t>(value) - pending_flags[slot];
    pending_flags[slot] = value;
  }
  void reserve_pending(int64_t extra) {
    const size_t needed = pending_slots.size() + static_cast<size_t>(extra);
    if (needed > pending_slots.capacity()) pending_slots.reserve(2 * needed);
  }
  void warn_bounds(const BoundsError& error);
};

}  // namespace rec_sdk
