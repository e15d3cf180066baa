// The engine's calls for saves: versions and changes of rows, loading, and snapshots. The rows of a snapshot
// are taken while batches are planned and applied.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "torch_npu_ext/engine/api/tables.h"

namespace rec_sdk {

// Rows taken from a snapshot.
struct TakenRows {
  std::vector<int64_t> ids;
  std::vector<int32_t> slots;  // [rows] kNoSlot if the record is in `records`
  std::vector<uint32_t> rows;
  UnsetBytes records;                    // [rows, record_bytes]; empty if all rows have a slot
  std::vector<RowColumnValues> columns;  // empty if the table saves no columns
  ColumnSet kept;                        // the columns that are valid in `columns`
  int64_t record_bytes = 0;

  void reserve(size_t count, bool with_columns) {
    ids.reserve(count);
    slots.reserve(count);
    rows.reserve(count);
    if (with_columns) columns.reserve(count);
  }
};

class Saves : public GroupAccess {
 public:
  explicit Saves(const std::shared_ptr<LockedGroup>& shared) : GroupAccess(shared), tables_(shared) {}

  std::vector<int64_t> ids_with_records(int32_t table);
  std::vector<int64_t> unlisted_ids(int32_t table, Span<int64_t> ids);
  uint64_t version();
  uint64_t next_version();
  std::pair<std::vector<int64_t>, int64_t> changed_ids(int32_t table, uint64_t since);
  std::pair<std::vector<int64_t>, bool> removed_ids(int32_t table, uint64_t since);
  void forget_changes(int32_t table, uint64_t upto);
  std::pair<std::vector<int64_t>, int64_t> scan_ids(int32_t table, int64_t begin, int64_t least);

  // Must be called before ids are inserted in the order of scan_ids(). That is the order of their positions
  // in a map, so without reserved space the ids would crowd at one end of the growing map, and searches would
  // be long.
  void reserve_ids(int32_t table, int64_t extra);
  struct RecordPart {
    const char* values;    // [count, bytes]
    int64_t begin, bytes;  // the position of these bytes in a record
  };
  std::vector<int64_t> load_rows(int32_t table, Span<int64_t> ids, const std::vector<RecordPart>& parts,
                                 bool whole);
  std::vector<int64_t> window_ids(int32_t table);
  void put_spilled(int32_t table, Span<int64_t> rows, const float* sums);

  int64_t open_snapshot(int32_t table);
  int64_t open_snapshot(int32_t table, Span<int64_t> ids);
  int64_t open_snapshot_since(
      int32_t table, uint64_t since);  // the rows are not sorted yet, because training waits for this call
  void close_snapshot(int32_t table);
  int64_t snapshot_pending(int32_t table);
  TakenRows take_ids(int32_t table, Span<int64_t> ids);
  TakenRows take_slots(int32_t table, Span<int32_t> slots);
  std::pair<TakenRows, int64_t> take_next(int32_t table, int64_t begin, int64_t least);

 private:
  template <class Fill>
  int64_t open(int32_t table, const Fill& fill);  // calls fill(table, snapshot)
  template <class Visit>
  void for_each_moving_row(int32_t table, const Visit& visit) const;
  void mark_moving(int32_t table, Snapshot* snapshot) const;
  static void take(Table* source, int64_t id, uint32_t row, uint32_t slot, TakenRows* taken);
  static void take_listed(Table* source, int64_t* at, int64_t least, TakenRows* taken);
  void copy_records(const Table& source, TakenRows* taken) const;

  Tables tables_;
};

}  // namespace rec_sdk
