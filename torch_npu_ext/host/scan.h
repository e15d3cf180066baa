// The first pass of a plan: finds the entry of every lookup and numbers the distinct rows of the batch.
#pragma once

#include <cstdint>
#include <exception>
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

struct Range {
  int64_t begin, end;
  int64_t size() const { return end - begin; }
};

// A table has its own part of every array, from its first lookup on: no table waits for another.
class Scan {
 public:
  void begin(Group* group, const Batch& batch);  // the current batch of group->uses; throws
  void run(Group* group, const Batch& batch);    // all tables; throws, and leaves what it did to rollback()
  void rollback(Group* group) noexcept;          // entries as they were before begin()

  Range unique_rows(int32_t t) const { return part(tables_[t], tables_[t].uniques); }  // of `unique`
  Range missing(int32_t t) const { return part(tables_[t], tables_[t].misses); }       // of `misses`
  // Those of the batch's pieces that look up the table.
  size_t piece_begin(int32_t t) const { return tables_[t].first_piece; }
  size_t piece_end(int32_t t) const { return tables_[t].end_piece; }

  HugeArray<uint32_t> local;    // [N] lookup -> its row in `unique`; its key in between
  HugeArray<UniqueRow> unique;  // by first occurrence
  HugeArray<Miss> misses;

 private:
  struct alignas(64) TableScan {  // a cache line: threads write side by side
    int64_t first = 0;            // lookup
    int64_t uniques = 0, misses = 0;
    size_t first_piece = 0, end_piece = 0;
    bool located = false;  // its part of `local` holds what locate() found
    std::exception_ptr error;
  };
  static Range part(const TableScan& table, int64_t count) { return {table.first, table.first + count}; }

  template <class Use>
  void with_directory(Group* group, int32_t t, const Use& use);
  void locate_lookups(Group* group, const Batch& batch);
  void scan_table(Group* group, int32_t t, const Batch& batch);
  template <class Directory>
  void scan_pieces(Directory directory, const Batch& batch, TableScan* table);
  template <class Directory, class Id>
  void scan_piece(Directory* directory, const Id* ids, int64_t count, uint32_t* local_out, TableScan* table);

  uint64_t* stamps_ = nullptr;  // of SlotUses, by key
  uint32_t epoch_ = 0;
  HugeArray<uint32_t> last_batch_;  // [N + 1] of each unique row: the last batch before that used its slot
  std::vector<TableScan> tables_;
};

}  // namespace rec_sdk
