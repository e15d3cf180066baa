// Read-only lookups for evaluation: finding and reading the rows of a range of bags. No row is inserted,
// pinned or swapped.
#pragma once

#include <cstdint>
#include <vector>

#include "torch_npu_ext/engine/base/memory.h"
#include "torch_npu_ext/engine/batch/batch.h"
#include "torch_npu_ext/engine/group/group.h"

namespace rec_sdk {

// The records in a swap or a read that have initial values, for tables whose initial values the caller
// generates.
struct InitialRows {
  void add(int64_t place, int32_t table) {
    places.push_back(static_cast<int32_t>(place));
    tables.push_back(table);
  }
  std::vector<int32_t> places;
  std::vector<int32_t> tables;  // the table of each record
};

// The locations of the rows of a range of bags.
struct ReadPlan {
  struct HostRow {
    int64_t id;
    uint32_t row;
    int32_t table;
    bool known;  // false if the id has no row, and thus its initial record is read
  };
  std::vector<int64_t> offsets;  // [bags + 1]
  std::vector<int32_t>
      index;  // [N] cache slots if all_resident, else positions in resident_slots followed by host_rows
  std::vector<int32_t> resident_slots;  // [R] distinct; empty if all_resident
  std::vector<HostRow> host_rows;       // distinct
  std::vector<uint64_t> sources;        // serials of the plans with pending write-backs of these rows
  bool all_resident = true;
};

// Finds and reads rows for evaluation. It reuses its buffers from batch to batch.
class Reader {
 public:
  // Finds the rows of bags [bag_begin, bag_end). Throws std::invalid_argument, and std::out_of_range for ids
  // out of range in a table with kFatal.
  void find(const BatchInput& input, int64_t bag_begin, int64_t bag_end, Group* group, ReadPlan* plan);
  // Reads the records of plan.host_rows. No plan may have moved these rows since find().
  static void read(const Group& group, const ReadPlan& plan, char* records /*[host_rows, bytes]*/,
                   InitialRows* initial);

 private:
  void probe(Group* group, ReadPlan* plan);
  void compact(const Group& group, ReadPlan* plan);
  static void will_need(const Group& group, const ReadPlan& plan);

  Batch batch_;
  std::vector<BoundsError> bounds_errors_;
  HugeArray<ReadPlan::HostRow> found_;  // [N]
  HugeArray<uint64_t> stamps_;          // [slots] epoch << 32 | position in resident_slots
  uint32_t epoch_ = 0;
};

}  // namespace rec_sdk
