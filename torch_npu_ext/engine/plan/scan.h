// The first pass of planning, which finds the row of every lookup and numbers the distinct rows of the batch.
#pragma once

#include <cstdint>
#include <exception>
#include <vector>

#include "torch_npu_ext/engine/base/memory.h"
#include "torch_npu_ext/engine/batch/batch.h"
#include "torch_npu_ext/engine/group/group.h"

namespace rec_sdk {

// The key of a row during planning: its slot, or group.slots + m for the m-th missing row if no slot was free
// for it. The entry of a missing row in the map stores its key, so that one search per lookup also detects
// repeated ids.
using RowKey = uint32_t;

// The last pass prefetches for the lookup that is this far ahead, and reads its row even behind the last one.
constexpr int64_t kReadBeyond = 32;

constexpr uint32_t kKnownRow = uint32_t{1} << 31;  // flag of a listed lookup: its id has a row but no slot

struct UniqueRow {
  RowKey key;
  uint32_t count;  // number of lookups; later the next free position in the row's segment
};

struct Miss {
  int64_t id;
  uint32_t row;
  bool added;  // whether this plan added the id; undone if planning fails
};

struct Range {
  int64_t begin, end;
  int64_t size() const { return end - begin; }
};

// The part of a batch that one thread handles: all lookups of a table, or some lookups of a large one. A
// share contains all lookups of each of its rows.
struct alignas(64) Share {  // one cache line each, since threads write neighbouring elements
  int32_t table = 0;
  int64_t first = 0;             // index of its rows in `unique`, and of its slots in the plan
  int64_t count = 0;             // number of lookups
  int64_t uniques = 0;           // number of rows, including the default row if it is looked up
  int64_t uniques_before = 0;    // rows of the table in earlier shares, without the default row
  int64_t default_row = -1;      // index of the default row in `unique`, or -1
  int64_t defaults = 0;          // number of lookups of the default row
  int64_t position = 0;          // position of its first segment
  int64_t default_position = 0;  // position of the lookups of the default row
  uint32_t* lookups = nullptr;   // [count] ascending; null: all lookups of the table, from `first` on
  uint32_t* rows = nullptr;      // [count] the index in `unique` of each lookup's row
  int64_t end() const { return first + uniques; }  // end of its rows in `unique`
  int64_t rows_found() const { return uniques - (default_row >= 0 ? 1 : 0); }
};

// The state of a scan. In every array, each table uses its own range, which begins at the index of its first
// lookup, so that tables can be scanned in parallel.
class Scan {
 public:
  void begin(Group* group,
             const Batch& batch);  // starts the scan of the current batch of group->uses; may throw
  // Scans all tables. If it throws, the caller must call rollback(). `logs` has one entry per table.
  void run(Group* group, const Batch& batch, std::vector<LifecycleLog>* logs);
  void rollback(Group* group) noexcept;  // undoes all changes since begin()

  int64_t unique_count(int32_t t) const { return last_share(t).uniques_before + last_share(t).rows_found(); }
  int64_t segment_lookups() const { return segment_lookups_; }  // excludes lookups of default rows
  int64_t default_lookups(int32_t t) const;
  Range missing(int32_t t) const {  // the range of the table's misses in `misses`
    return {tables_[t].first, tables_[t].first + tables_[t].misses};
  }
  // The shares are ordered by table.
  int64_t share_count() const { return static_cast<int64_t>(shares_.size()); }
  const Share& share(int64_t s) const { return shares_[s]; }
  template <class Visit>  // calls visit(UniqueRow) for each unique row of a table
  void for_each_unique(int32_t t, Visit visit) const {
    for (size_t s = tables_[t].first_share; s < tables_[t].end_share; ++s) {
      for (int64_t u = shares_[s].first; u < shares_[s].end(); ++u) visit(unique[u]);
    }
  }
  // The range of the batch's pieces that look up rows of the table.
  size_t piece_begin(int32_t t) const { return tables_[t].first_piece; }
  size_t piece_end(int32_t t) const { return tables_[t].end_piece; }

  HugeArray<uint32_t>
      local;  // [N + kReadBeyond] the index in `unique` of each lookup's row; for divided tables its key
  HugeArray<UniqueRow> unique;  // ordered by share, then by first occurrence
  HugeArray<Miss> misses;

 private:
  struct alignas(64) TableScan {  // one cache line each, since threads write neighbouring elements
    int64_t first = 0;            // first lookup
    int64_t count = 0;            // number of lookups
    int64_t misses = 0;
    size_t first_piece = 0, end_piece = 0;
    size_t first_share = 0, end_share = 0;
    size_t first_part = 0, end_part = 0;  // parts of a located table
    int64_t bound_before = 0;             // the table's row bound before the plan
    std::exception_ptr error;
    bool admits = false;  // whether the table has an admission rule
    bool small = false;   // whether the table is searched by locate_small()
    LifecycleLog* log = nullptr;
    bool divided() const { return end_share - first_share > 1; }
    // Returns whether all lookups are searched before any missing row gets a key.
    bool located() const { return divided() || admits; }
    // Returns whether rows are numbered only after all lookups have keys.
    bool numbered_last() const { return admits || small; }
  };
  struct Part {  // a range of lookups of a piece
    int32_t table;
    const Batch::Piece* piece;
    int64_t begin, end;
    int64_t missed = 0;  // number of its entries in missed_, which start at index `begin`
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

  uint64_t* stamps_ = nullptr;  // stamps of SlotUses, indexed by key
  uint32_t epoch_ = 0;
  HugeArray<uint32_t> last_batch_;  // [N] for each unique row, the previous batch that used its slot
  HugeArray<uint32_t> lists_;       // the lists of lookups of the shares of divided tables
  HugeArray<uint32_t> list_rows_;   // [N + kReadBeyond] the rows of these lookups
  HugeArray<uint32_t> missed_;      // [N] for each part, its lookups of missing rows, with the flag kKnownRow
  std::vector<TableScan> tables_;
  std::vector<Share> shares_;
  std::vector<Part> parts_;                          // of located tables, by table
  std::vector<std::vector<UnknownLookup>> unknown_;  // indexed by table
  int64_t segment_lookups_ = 0;
};

}  // namespace rec_sdk
