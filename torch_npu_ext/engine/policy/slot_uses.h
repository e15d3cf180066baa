// The last batch that used each slot, and which slots are pinned by batches in flight. Pinning and unpinning
// take no time per row: while batches end in the order of their plans, a slot is pinned if the last batch
// that used it is in flight. If a batch ends before an earlier one, the next search for victims first marks
// the slots of the batches in flight.
#pragma once

#include <cstdint>
#include <vector>

#include "torch_npu_ext/engine/base/memory.h"
#include "torch_npu_ext/engine/batch/plan_buffers.h"

namespace rec_sdk {

// The last uses and pins of all slots of a group.
class SlotUses {
 public:
  explicit SlotUses(int64_t slots = 0, uint32_t epoch = 0)
      : stamps_(static_cast<size_t>(slots + kForeseenLookups)), slots_(slots), epoch_(epoch) {}

  // Begins the next batch; throws std::bad_alloc.
  void begin_batch(int64_t lookups);
  uint32_t epoch() const { return epoch_; }
  uint32_t renumbered() const { return renumbered_; }  // number of times that epochs were renumbered

  // [slots + lookups of the batch] the stamp of each slot: epoch << 32 | number of the row in that batch, or
  // 0 if the slot has no row. The stamps behind the slots are for missing rows of the current batch.
  uint64_t* stamps() const { return stamps_.data(); }
  uint32_t last_batch(int64_t slot) const { return static_cast<uint32_t>(stamps_[slot] >> 32); }
  void touch(int64_t slot) { stamps_[slot] = static_cast<uint64_t>(epoch_) << 32; }
  void restore(int64_t slot, uint32_t batch) { stamps_[slot] = static_cast<uint64_t>(batch) << 32; }
  void forget(int64_t slot) { stamps_[slot] = 0; }

  void hold(PlanBuffers* plan) noexcept;  // pins the unique_slots of the current batch, once it is planned
  void release(const PlanBuffers& plan) noexcept;

  const std::vector<PlanBuffers*>& in_flight() const { return in_flight_; }  // oldest first
  uint64_t serial() const { return held_plans_; }              // serial number of the latest plan
  uint64_t newest_version() const { return held_plans_ + 1; }  // an upper bound of the versions of rows
  void start_at(uint64_t serial) { held_plans_ = serial; }     // sets the serial number before the next plan

  // Returns whether the slot is pinned or used by the current batch. Precondition: prepare_held(), or
  // mark_held() if batches are in flight.
  bool held(int64_t slot) const {
    const uint32_t batch = last_batch(slot);
    return batch >= oldest_ && (in_order_ || batch == epoch_ || marks_[slot] == mark_);
  }
  // Returns whether the pinned slots are exactly the slots whose last use is in batch oldest_in_flight() or
  // later.
  bool in_order() const { return in_order_; }
  uint32_t oldest_in_flight() const { return oldest_; }
  void prepare_held() {  // throws std::bad_alloc
    if (!in_order_ && !marked_) mark_held();
  }

  // The numbers of slots that batches in flight pin, not counting the current batch. held_at_most() is an
  // upper bound: it counts a slot once for each batch that pins it. marked_count() is exact after
  // mark_held().
  int64_t held_at_most(int32_t table) const;
  void mark_held();  // throws std::bad_alloc
  bool marked(int64_t slot) const { return marks_[slot] == mark_; }
  int64_t marked_count(int32_t table) const { return table < int32_t(counts_.size()) ? counts_[table] : 0; }

 private:
  // Address space is reserved for stamps of this many lookups, and memory is committed when batches use it.
  // For a larger batch the stamps are copied to a longer array.
  static constexpr int64_t kForeseenLookups = int64_t{1} << 24;

  void renumber();

  HugeArray<uint64_t> stamps_;
  int64_t slots_;
  uint32_t epoch_;
  uint32_t renumbered_ = 0;
  uint64_t held_plans_ = 0;              // number of plans so far
  std::vector<PlanBuffers*> in_flight_;  // oldest first
  uint32_t oldest_ = 0;                  // epoch of the oldest batch in flight, or of the current one
  bool in_order_ = true;                 // no batch after the oldest one in flight has ended
  bool marked_ = false;                  // marks_ are up to date for the current batch
  HugeArray<uint32_t> marks_;            // [slots] a slot is pinned if its mark equals mark_
  uint32_t mark_ = 0;
  std::vector<int64_t> counts_;  // [T] number of marked slots
};

}  // namespace rec_sdk
