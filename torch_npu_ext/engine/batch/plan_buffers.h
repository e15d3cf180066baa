// The arrays of one plan, in one arena: those that the device needs first, so that one copy brings them
// there.
#pragma once

#include <atomic>
#include <cstdint>
#include <limits>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "torch_npu_ext/engine/base/memory.h"
#include "torch_npu_ext/engine/batch/hot_segments.h"
#include "torch_npu_ext/engine/directory/candidates.h"
#include "torch_npu_ext/engine/directory/count_sketch.h"
#include "torch_npu_ext/engine/directory/table_clock.h"

namespace rec_sdk {

struct BoundsError {
  int32_t table;
  int64_t count;
  int64_t example;
};

// kPlanned -> kApplying -> kApplied, or kPlanned -> kCancelled. While it is kApplying the cache may have been
// written to: such a plan can only be completed.
enum class PlanState { kPlanned, kApplying, kApplied, kCancelled };

// A plan's changes of the life of a table's ids, to be undone when it is cancelled.
struct LifecycleLog {
  struct Counted {
    int64_t id;
    Candidates::Values values;
  };
  struct Admitted {
    int64_t id;
    uint32_t row;
    int64_t place;              // as its lookup has it
    Candidates::Values values;  // what was counted of it
  };
  std::vector<Counted> candidates;  // before the batch; a count of 0: it was none
  std::vector<Admitted> admitted;   // with the batch, in the order of their rows
  CountSketch::Log sketch;          // of lookups of ids without a row, in their order
  int64_t sketched = 0;             // how many these are
  HugeArray<char> columns;          // of the unique rows, before the batch
  int64_t latest_before = 0;        // timestamp of the table
  int64_t default_lookups = 0;
  int64_t candidates_added = 0;  // less those that were admitted

  // Timestamps of lookups later than `most` are set aside. How many, an id with its own, and the table's
  // then.
  int64_t most = std::numeric_limits<int64_t>::max(), rejected = 0, latest = 0;
  std::pair<int64_t, int64_t> example;

  int64_t accepted(int64_t timestamp, const TableClock& clock) const {
    return timestamp <= most ? timestamp : clock.timestamp;
  }

  void clear() {
    candidates.clear();
    admitted.clear();
    sketch.clear();
    sketched = 0;
    default_lookups = candidates_added = rejected = 0;
    most = std::numeric_limits<int64_t>::max();
  }
};

// These decide the size of an arena. N lookups, U unique rows, H hot segments, O rows out, I rows in,
// T tables, P and Q rows out and in that have gradients in the open window. Slots are the group's.
struct PlanShape {
  int64_t lookups = 0, bags = 0, tables = 0, uniques = 0, out = 0, in = 0, window_out = 0, window_in = 0;
  bool pooled = false, scaled = false, weighted = false;
  bool sources = false;  // a sequence of several features
  bool ids = false;      // of the unique rows
  bool origins = false;  // of the lookups
};

// Memory of the caller's for a plan's arrays; `owner` is let go with the last use of them.
struct ExternalArena {
  char* data = nullptr;
  size_t bytes = 0;
  std::shared_ptr<void> owner;
};

struct PlanBuffers {
  // A part of the arena that goes to the device, in units of 4 bytes from its begin.
  struct Field {
    int64_t begin, words;  // begin is -1 for an array that the batch does not need
    enum Type { kInt32, kInt64, kFloat32, kHotSegment } type;
  };

  // A row in that one of the sources takes out.
  struct Late {
    int32_t place;  // among the rows in
    uint64_t source;
  };

  static size_t arena_bytes(const PlanShape& shape);
  // Lays the arrays out in `arena` or, without one, in memory of its own. Throws std::invalid_argument for an
  // arena that is too small, and std::bad_alloc.
  void layout(const PlanShape& shape, ExternalArena arena);

  // In the order of the arrays below. Valid until the next layout().
  std::vector<Field> device_fields() const;
  const char* arena() const { return arena_; }
  size_t device_bytes() const { return device_bytes_; }

  int64_t lookups = 0, bags = 0, tables = 0, uniques = 0, rows_out = 0, rows_in = 0;
  int64_t window_out = 0, window_in = 0, hot = 0;
  // On the device.
  int64_t* offsets = nullptr;               // [bags + 1] pooled only
  int32_t* slots = nullptr;                 // [N]
  int32_t* unique_slots = nullptr;          // [U] by table, but those of a table in no order
  int32_t* device_table_offsets = nullptr;  // [T + 1] into the unique rows
  int32_t* segment_offsets = nullptr;       // [U + 1] from 0 to M: N without the default lookups
  int32_t* grad_row =
      nullptr;  // [N] in segment order, default lookups last: the lookup of its feature; pooled: the sample
  int32_t* grad_source = nullptr;       // [N] the feature; only a sequence of several
  int32_t* grad_column = nullptr;       // [N] pooled only
  float* scale = nullptr;               // [N] 1 / length; only when some feature is MEAN
  int32_t* positions = nullptr;         // [N] segment order -> lookup; weighted bags only
  int32_t* swap_in_slots = nullptr;     // [I]
  int32_t* swap_out_places = nullptr;   // [I] for each: its row that leaves, or -1; only when rows leave
  int64_t* window_out_slots = nullptr;  // [P] those of swap_out_slots
  int64_t* window_in_slots = nullptr;   // [Q] those of swap_in_slots
  int64_t* unique_ids = nullptr;        // [U] of unique_slots; only in groups with row_ids
  HotSegment* hot_segments = nullptr;   // [H]; room for hot_segment_places(N)
  // [N] of each lookup its slot; slots of the group + i, if its row is the i-th that comes. Only where rows
  // come, and the device asks for it.
  int32_t* origins = nullptr;
  // On the host.
  int32_t* swap_out_slots = nullptr;             // [O], in the order of swap_in_slots
  uint32_t* swap_out_rows = nullptr;             // [O]
  int64_t* swap_out_ids = nullptr;               // [O]
  uint32_t* swap_in_rows = nullptr;              // [I]
  int64_t* swap_in_ids = nullptr;                // [I]
  uint8_t* swap_in_added = nullptr;              // [I] the plan added the id to its table
  std::vector<int32_t> table_offsets;            // [T + 1] into the unique rows
  std::vector<int32_t> out_offsets;              // [T + 1] into the rows out
  std::vector<int32_t> in_offsets;               // [T + 1] into the rows in
  std::vector<int64_t> rows_before;              // [T] Table::row_bound() before the plan
  std::vector<int64_t> slots_before;             // [T] Table::slot_bound()
  std::vector<int32_t> pending_out, pending_in;  // [P], [Q] indices into swap_out_slots / swap_in_slots
  std::vector<uint32_t> pending_out_sums, pending_in_sums;  // their places among the window's sums
  std::vector<uint64_t> sources;  // serials of the plans whose rows out this one wants, not landed when made
  std::vector<Late> late;         // ascending
  std::vector<BoundsError> bounds_errors;              // counted when the plan is applied
  std::vector<int64_t> table_lookups, table_new_rows;  // [T]
  std::vector<LifecycleLog> lifecycle_logs;            // [T]
  uint64_t window_epoch = 0;
  uint32_t epoch = 0;   // of the batch, in SlotUses
  uint64_t serial = 0;  // the same, without batches that failed

  std::atomic<PlanState> state{PlanState::kPlanned};  // changes under the mutex of PlanOrder
  std::atomic<int> kept{0};  // by threads about to apply it: it does not undo itself meanwhile
  // Under the engine's mutex: pins end with the second of these.
  bool finished = false;  // the group knows that it is applied
  bool ended = false;     // nothing holds it any more

 private:
  friend class PlanPool;
  size_t place_arrays(const PlanShape& shape, char* base);

  char* arena_ = nullptr;
  size_t device_bytes_ = 0;
  HugeBuffer memory_;
  std::shared_ptr<void> owner_;
};

class PlanPool : public std::enable_shared_from_this<PlanPool> {
 public:
  // Buffers that come back to the pool when the last reference goes, wherever that is.
  std::shared_ptr<PlanBuffers> take();

 private:
  void give(PlanBuffers* buffers) noexcept;

  std::mutex mutex_;
  std::vector<std::unique_ptr<PlanBuffers>> free_;
};

}  // namespace rec_sdk
