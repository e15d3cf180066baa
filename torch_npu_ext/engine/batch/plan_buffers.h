// The arrays of one plan in one arena. The device arrays come first, so that one copy uploads them.
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

// Transitions: kPlanned -> kApplying -> kApplied, or kPlanned -> kCancelled. In kApplying the cache may have
// been written, so the plan can only be completed.
enum class PlanState { kPlanned, kApplying, kApplied, kCancelled };

// A log of a plan's changes to the id lifecycle of a table. Cancelling the plan undoes them.
struct LifecycleLog {
  struct Counted {
    int64_t id;
    Candidates::Values values;
  };
  struct Admitted {
    int64_t id;
    uint32_t row;
    int64_t place;              // position of its lookup, as in UnknownLookup
    Candidates::Values values;  // the counts of the id as a candidate
  };
  std::vector<Counted>
      candidates;  // values before the batch; a count of 0 means that the id was not a candidate
  std::vector<Admitted> admitted;  // ids that the batch admitted, in the order of their rows
  CountSketch::Log sketch;         // the counted lookups of ids without a row, in order
  int64_t sketched = 0;            // the number of these lookups
  HugeArray<char> columns;         // columns of the unique rows before the batch
  int64_t latest_before = 0;       // the table's timestamp before the batch
  int64_t default_lookups = 0;
  int64_t candidates_added = 0;  // the change of the number of candidates

  // Timestamps later than `most` are rejected. `rejected` is the number of rejected timestamps, `example` is
  // an id with such a timestamp, and `latest` is the table's latest timestamp when it was rejected.
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

// The counts that determine the size of an arena: N lookups, U unique rows, H hot segments, O rows out, I
// rows in and T tables. P of the rows out and Q of the rows in have sums in the accumulation window.
struct PlanShape {
  int64_t lookups = 0, bags = 0, tables = 0, uniques = 0, out = 0, in = 0, window_out = 0, window_in = 0;
  bool pooled = false, scaled = false, weighted = false;
  bool sources =
      false;         // whether each lookup needs the feature of its gradient: a sequence of several features
  bool ids = false;  // whether the plan contains the ids of the unique rows
  bool origins = false;  // whether the plan contains the origins of the lookups
};

// Memory of the caller for a plan's arrays; `owner` is released after their last use.
struct ExternalArena {
  char* data = nullptr;
  size_t bytes = 0;
  std::shared_ptr<void> owner;
};

struct PlanBuffers {
  // The location of a device array in the arena, in units of 4 bytes from its start.
  struct Field {
    int64_t begin, words;  // begin is -1 for an array that the batch does not need
    enum Type { kInt32, kInt64, kFloat32, kHotSegment } type;
  };

  // A row that this plan swaps in while another plan's write-back of it is pending.
  struct Late {
    int32_t place;    // the row's index among the rows in
    uint64_t source;  // serial of the plan that wrote it back
  };

  static size_t arena_bytes(const PlanShape& shape);
  // Places the arrays in `arena`, or in newly allocated memory if it is null. Throws std::invalid_argument if
  // the arena is too small, and std::bad_alloc.
  void layout(const PlanShape& shape, ExternalArena arena);

  // Returns the device arrays in the order of their declaration below. Valid until the next layout().
  std::vector<Field> device_fields() const;
  const char* arena() const { return arena_; }
  size_t device_bytes() const { return device_bytes_; }

  int64_t lookups = 0, bags = 0, tables = 0, uniques = 0, rows_out = 0, rows_in = 0;
  int64_t window_out = 0, window_in = 0, hot = 0;
  // Device arrays.
  int64_t* offsets = nullptr;               // [bags + 1] pooled only
  int32_t* slots = nullptr;                 // [N]
  int32_t* unique_slots = nullptr;          // [U] by table, in no order within a table
  int32_t* device_table_offsets = nullptr;  // [T + 1] into the unique rows
  int32_t* segment_offsets = nullptr;       // [U + 1] from 0 to N minus lookups of default rows
  // [N] in segment order, with lookups of default rows last: the lookup's index within its feature, or its
  // sample if the group is pooled.
  int32_t* grad_row = nullptr;
  int32_t* grad_source = nullptr;  // [N] the feature of each lookup; only for a sequence of several features
  int32_t* grad_column = nullptr;  // [N] pooled only
  float* scale = nullptr;          // [N] 1 / length of the bag; only if some feature is MEAN
  int32_t* positions = nullptr;    // [N] segment order -> lookup; weighted bags only
  int32_t* swap_in_slots = nullptr;    // [I]
  int32_t* swap_out_places = nullptr;  // [I] index of the victim that had the slot, or -1; only with rows out
  int64_t* window_out_slots = nullptr;  // [P] slots of the rows out with sums
  int64_t* window_in_slots = nullptr;   // [Q] slots of the rows in with sums
  int64_t* unique_ids = nullptr;        // [U] ids of unique_slots; only in groups with row_ids
  HotSegment* hot_segments = nullptr;   // [H]; hot_segment_places(N) are reserved
  // [N] where the row of each lookup is before the swap: its slot, or group.slots + i for the i-th row in,
  // which is still in the staging buffer. Only in groups with origins, for plans with rows in.
  int32_t* origins = nullptr;
  // Host arrays.
  int32_t* swap_out_slots = nullptr;             // [O], in the order of swap_in_slots
  uint32_t* swap_out_rows = nullptr;             // [O]
  int64_t* swap_out_ids = nullptr;               // [O]
  uint32_t* swap_in_rows = nullptr;              // [I]
  int64_t* swap_in_ids = nullptr;                // [I]
  uint8_t* swap_in_added = nullptr;              // [I] whether the plan added the id to its table
  std::vector<int32_t> table_offsets;            // [T + 1] into the unique rows
  std::vector<int32_t> out_offsets;              // [T + 1] into the rows out
  std::vector<int32_t> in_offsets;               // [T + 1] into the rows in
  std::vector<int64_t> rows_before;              // [T] Table::row_bound() before the plan
  std::vector<int64_t> slots_before;             // [T] Table::slot_bound() before the plan
  std::vector<int32_t> pending_out, pending_in;  // [P], [Q] indices into swap_out_slots / swap_in_slots
  std::vector<uint32_t> pending_out_sums, pending_in_sums;  // the positions of their sums in SpilledSums
  // The serials of plans whose write-backs of rows that this plan swaps in were pending when it was made.
  std::vector<uint64_t> sources;
  std::vector<Late> late;                              // ascending by place
  std::vector<BoundsError> bounds_errors;              // counted once the plan is applied
  std::vector<int64_t> table_lookups, table_new_rows;  // [T]
  std::vector<LifecycleLog> lifecycle_logs;            // [T]
  uint64_t window_epoch = 0;
  uint32_t epoch = 0;   // number of the batch in SlotUses
  uint64_t serial = 0;  // number of the plan; failed batches do not count

  std::atomic<PlanState> state{PlanState::kPlanned};  // written under the mutex of PlanOrder
  std::atomic<int> kept{
      0};  // number of handles of threads about to apply the plan, which prevent cancelling it
  // Written under the engine's mutex. The slots are unpinned when `finished` and `ended` are true.
  bool finished = false;  // the group has recorded that the plan was applied
  bool ended = false;     // its pinning handle was released

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
  // Returns buffers that return to the pool when their last reference is released, on any thread.
  std::shared_ptr<PlanBuffers> take();

 private:
  void give(PlanBuffers* buffers) noexcept;

  std::mutex mutex_;
  std::vector<std::unique_ptr<PlanBuffers>> free_;
};

}  // namespace rec_sdk
