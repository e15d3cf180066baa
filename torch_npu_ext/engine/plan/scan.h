// The first pass of a plan: finds the entry of every lookup and numbers the distinct rows of the batch.
#pragma once

#include <cstdint>
#include <exception>
#include <vector>

#include "torch_npu_ext/engine/base/memory.h"
#include "torch_npu_ext/engine/batch/batch.h"
#include "torch_npu_ext/engine/group/group.h"

namespace rec_sdk {

// The entry of a lookup during a plan: a slot of the group, or group.slots + m for the m-th row that is
// not resident and for which no slot was free. A missed row is marked in its own entry, so one probe per
// lookup finds duplicates too.
using RowKey = uint32_t;

constexpr uint32_t kKnownRow = uint32_t{1} << 31;  // beside a lookup: its id has a row, which has no slot

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

// A thread's part of a plan: the lookups of a table, or some of those of a large one. All lookups of a row
// are in one share.
struct alignas(64) Share {  // a cache line: threads write side by side
  int32_t table = 0;
  int64_t first = 0;             // place of its rows in `unique`, and of its slots in the plan
  int64_t count = 0;             // lookups
  int64_t uniques = 0;           // rows; the default row, if some lookup is its, counts as one
  int64_t uniques_before = 0;    // rows of the table in the shares before, without the default row
  int64_t default_row = -1;      // its place in `unique`, if any
  int64_t defaults = 0;          // lookups of the default row
  int64_t position = 0;          // of its first segment
  int64_t default_position = 0;  // of the lookups of the default row
  uint32_t* lookups = nullptr;   // [count] in order; null: all of the table, which are those from `first` on
  uint32_t* rows = nullptr;      // [count] of each of `lookups`: its row in `unique`
  int64_t end() const { return first + uniques; }  // of its rows in `unique`
  int64_t rows_found() const { return uniques - (default_row >= 0 ? 1 : 0); }
};

// A table has its own part of every array, from its first lookup on: no table waits for another.
class Scan {
 public:
  void begin(Group* group, const Batch& batch);  // the current batch of group->uses; throws
  // All tables; throws, and leaves what it did to rollback(). `logs` has one entry per table.
  void run(Group* group, const Batch& batch, std::vector<LifecycleLog>* logs);
  void rollback(Group* group) noexcept;  // entries as they were before begin()

  int64_t unique_count(int32_t t) const { return last_share(t).uniques_before + last_share(t).rows_found(); }
  int64_t segment_lookups() const { return segment_lookups_; }  // all but those of default rows
  int64_t default_lookups(int32_t t) const;
  Range missing(int32_t t) const {  // of `misses`
    return {tables_[t].first, tables_[t].first + tables_[t].misses};
  }
  // Ordered by table.
  int64_t share_count() const { return static_cast<int64_t>(shares_.size()); }
  const Share& share(int64_t s) const { return shares_[s]; }
  template <class Visit>  // visit(UniqueRow) of a table's
  void for_each_unique(int32_t t, Visit visit) const {
    for (size_t s = tables_[t].first_share; s < tables_[t].end_share; ++s) {
      for (int64_t u = shares_[s].first; u < shares_[s].end(); ++u) visit(unique[u]);
    }
  }
  // The pieces of the batch that look up the table.
  size_t piece_begin(int32_t t) const { return tables_[t].first_piece; }
  size_t piece_end(int32_t t) const { return tables_[t].end_piece; }

  HugeArray<uint32_t> local;    // [N] lookup -> its row in `unique`; its key, in a table of several shares
  HugeArray<UniqueRow> unique;  // by share, then by first occurrence
  HugeArray<Miss> misses;

 private:
  struct alignas(64) TableScan {  // a cache line: threads write side by side
    int64_t first = 0;            // lookup
    int64_t count = 0;            // lookups
    int64_t misses = 0;
    size_t first_piece = 0, end_piece = 0;
    size_t first_share = 0, end_share = 0;
    size_t first_part = 0, end_part = 0;  // of a table that is located
    int64_t bound_before = 0;             // of the table's rows
    std::exception_ptr error;
    bool admits = false;  // not all ids
    bool small = false;   // see locate_small()
    LifecycleLog* log = nullptr;
    bool divided() const { return end_share - first_share > 1; }
    // All lookups are searched before the first is answered.
    bool located() const { return divided() || admits; }
    // Rows are numbered when all lookups are answered.
    bool numbered_last() const { return admits || small; }
  };
  struct Part {  // of the lookups of a piece
    int32_t table;
    const Batch::Piece* piece;
    int64_t begin, end;
    int64_t missed = 0;  // the first so many from `begin` on in missed_
  };
  const Share& last_share(int32_t t) const { return shares_[tables_[t].end_share - 1]; }

  template <class Use>
  void with_directory(Group* group, int32_t t, const Use& use);
  template <class Use>
  void for_each_small(Group* group, const Batch& batch, const Use& use);
  void locate_small(Group* group, const Batch& batch);
  void locate_lookups(Group* group, const Batch& batch);
  void scan_table(Group* group, int32_t t, const Batch& batch);
  void list_parts(const Batch& batch);
  void count_unknown(Group* group, int32_t t, const Batch& batch);
  template <class Directory>
  void resolve_missed(Directory* directory, int32_t t, const Batch& batch);
  template <class Directory>
  void resolve_small(Directory* directory, int32_t t, const Batch& batch);
  template <class Directory>
  void resolve_unknown(Directory* directory, int32_t t, Table* table);
  template <class Directory, class Id>
  void scan_piece(Directory* directory, const Id* ids, int64_t count, uint32_t* local_out, Share* share);
  void number_divided();
  void list_lookups(Share* share) noexcept;
  template <class Lookups>
  void number_lookups(Share* share, const Lookups& lookups) noexcept;
  void place_segments(const Group& group) noexcept;
  void find_default_row(const Table& table, Share* share) const noexcept;

  uint64_t* stamps_ = nullptr;  // of SlotUses, by key
  uint32_t epoch_ = 0;
  HugeArray<uint32_t> last_batch_;  // [N] of each unique row: the last batch before that used its slot
  HugeArray<uint32_t> lists_;       // lookups of shares
  HugeArray<uint32_t> list_rows_;   // [N] rows of those
  HugeArray<uint32_t> missed_;      // [N] by part: lookups that have no key yet; see kKnownRow
  std::vector<TableScan> tables_;
  std::vector<Share> shares_;
  std::vector<Part> parts_;                          // of tables that are located, by table
  std::vector<std::vector<UnknownLookup>> unknown_;  // by table
  int64_t segment_lookups_ = 0;
};

}  // namespace rec_sdk
