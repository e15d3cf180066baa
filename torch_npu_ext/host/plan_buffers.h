// The arrays of one swap plan, and the pool they return to: fresh memory would fault at every batch.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "torch_npu_ext/host/memory.h"

namespace rec_sdk {

// N lookups, U unique rows, O rows out, I rows in, T tables. Slots are the group's.
struct PlanBuffers {
  // What a batch needs beside lookups: the arrays of bags, of bags of which some are means, of weighted bags.
  struct Needs {
    bool pooled, scaled, weighted;
  };
  // Capacity for a batch. `swaps` bounds O and I.
  void layout(int64_t lookups, int64_t bags, int64_t swaps, Needs needs);

  int64_t lookups = 0, bags = 0, uniques = 0, rows_out = 0, rows_in = 0;
  int32_t* slots = nullptr;            // [N]
  int64_t* offsets = nullptr;          // [bags + 1] pooled only
  int32_t* unique_slots = nullptr;     // [U] by table, but those of a table in no order
  int32_t* segment_offsets = nullptr;  // [U + 1] from 0 to M: N without the default lookups
  int32_t* positions = nullptr;        // [N] segment order -> lookup; weighted bags only
  int32_t* grad_row = nullptr;  // [N] in segment order, default lookups last: the lookup; pooled: the sample
  int32_t* grad_column = nullptr;                // [N] pooled only
  float* scale = nullptr;                        // [N] 1 / length; only when some feature is MEAN
  int32_t* swap_out_slots = nullptr;             // [O]
  uint32_t* swap_out_rows = nullptr;             // [O]
  int64_t* swap_out_ids = nullptr;               // [O]
  int32_t* swap_in_slots = nullptr;              // [I]
  uint32_t* swap_in_rows = nullptr;              // [I]
  int64_t* swap_in_ids = nullptr;                // [I]
  uint8_t* swap_in_added = nullptr;              // [I] the plan added the id to its table
  std::vector<int32_t> table_offsets;            // [T + 1] into the unique rows
  std::vector<int32_t> out_offsets;              // [T + 1] into the rows out
  std::vector<int32_t> in_offsets;               // [T + 1] into the rows in
  std::vector<int64_t> rows_before;              // [T] Table::row_bound() before the plan
  std::vector<int64_t> slots_before;             // [T] Table::slot_bound()
  std::vector<int32_t> pending_out, pending_in;  // [P], [Q] indices into swap_out_slots / swap_in_slots
  std::vector<uint32_t> pending_out_sums, pending_in_sums;  // their places in PendingSums
  uint64_t pending_epoch = 0;
  uint32_t epoch = 0;   // of the batch, in SlotUses
  uint64_t serial = 0;  // the same, without batches that failed

 private:
  HugeBuffer memory_;
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
