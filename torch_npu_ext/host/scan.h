// The first pass of a plan: finds the entry of every lookup and numbers the distinct rows of the batch.
#pragma once

#include <cstdint>
#include <vector>

#include "torch_npu_ext/host/batch.h"
#include "torch_npu_ext/host/group.h"
#include "torch_npu_ext/host/memory.h"

namespace rec_sdk {

// What a lookup's entry says during a plan: a slot of the group, or group.slots + m for the m-th row that is
// not resident and for which no slot was free. A missed row is marked in its own entry, so one probe per
// lookup finds duplicates too.
using RowKey = uint32_t;

struct UniqueRow {
  RowKey key;
  uint32_t count;  // of lookups; a cursor into the segment later
};

struct Miss {
  int64_t id;
  uint32_t row;
  bool added;  // by this plan: tentative until it is committed
};

class Scan {
 public:
  void begin(Group* group, int64_t lookups);  // of the current batch of group->uses; throws
  void scan_table(Group* group, int32_t table, const Batch& batch);  // tables in order; throws
  void rollback(Group* group) noexcept;                              // entries as they were before begin()

  int64_t unique_begin(int32_t table) const { return unique_offsets_[table]; }
  int64_t unique_end(int32_t table) const { return unique_offsets_[table + 1]; }
  int64_t miss_begin(int32_t table) const { return miss_offsets_[table]; }
  int64_t miss_end(int32_t table) const { return miss_offsets_[table + 1]; }

  HugeArray<uint32_t> local;    // [N] lookup -> unique row, numbered by first occurrence
  HugeArray<UniqueRow> unique;  // [U] tables in order
  HugeArray<Miss> misses;       // [M]

 private:
  // Where a key's stamp is; without a branch.
  struct Stamps {
    uint64_t* of_slots;
    uint64_t* of_misses;
    RowKey slots;
    uint64_t* at(RowKey key) const {
      const bool resident = key < slots;
      return (resident ? of_slots : of_misses) + (resident ? key : key - slots);
    }
  };
  template <class Directory, class Id>
  void scan_piece(Directory* directory, const Id* ids, int64_t count, uint32_t* local_out);
  template <class Directory>
  void scan_pieces(Directory directory, int32_t table, const Group& group, const Batch& batch);

  Stamps stamps_{};
  uint32_t epoch_ = 0;

  HugeArray<uint64_t> miss_stamps_;  // [N] for keys from group.slots on, as SlotUses has them for slots
  HugeArray<uint32_t> last_batch_;   // [U + 1] the last batch before this one that used the row's slot
  uint32_t renumbered_ = 0;
  uint32_t unique_count_ = 0;
  int64_t miss_count_ = 0;
  int32_t last_table_ = -1;                             // the scan has begun
  size_t next_piece_ = 0;                               // pieces are in table order, as are the scans
  std::vector<int64_t> unique_offsets_, miss_offsets_;  // [T + 1]
};

}  // namespace rec_sdk
