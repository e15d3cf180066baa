// Which batch used each slot last, and which slots the batches in flight hold. Holding and letting go cost
// nothing per row: a slot is held when the batch that used it last is in flight. Only where a batch ended
// before an earlier one are the slots of those in flight marked one by one.
#pragma once

#include <cstdint>
#include <vector>

#include "torch_npu_ext/engine/base/memory.h"
#include "torch_npu_ext/engine/batch/plan_buffers.h"

namespace rec_sdk {

class SlotUses {
 public:
  explicit SlotUses(int64_t slots = 0, uint32_t epoch = 0)
      : stamps_(static_cast<size_t>(slots + kForeseenLookups)), slots_(slots), epoch_(epoch) {}

  // The current batch, from now on; throws std::bad_alloc.
  void begin_batch(int64_t lookups);
  uint32_t epoch() const { return epoch_; }
  uint32_t renumbered() const { return renumbered_; }  // how often epochs began anew

  // [slots + lookups of the batch] epoch << 32 | unique row in that batch; 0 when there is no row. Stamps
  // behind the slots are a batch's own, for rows that it misses.
  uint64_t* stamps() const { return stamps_.data(); }
  uint32_t last_batch(int64_t slot) const { return static_cast<uint32_t>(stamps_[slot] >> 32); }
  void touch(int64_t slot) { stamps_[slot] = static_cast<uint64_t>(epoch_) << 32; }
  void restore(int64_t slot, uint32_t batch) { stamps_[slot] = static_cast<uint64_t>(batch) << 32; }
  void forget(int64_t slot) { stamps_[slot] = 0; }

  void hold(PlanBuffers* plan) noexcept;  // the current batch succeeded, with these unique_slots
  void release(const PlanBuffers& plan) noexcept;

  const std::vector<PlanBuffers*>& in_flight() const { return in_flight_; }  // oldest first
  uint64_t serial() const { return held_plans_; }                            // of the latest plan held
  uint64_t newest_version() const { return held_plans_ + 1; }                // that a row can have by now
  void start_at(uint64_t serial) { held_plans_ = serial; }                   // before the first plan

  // Whether the slot is held, or used by the current batch. Needs prepare_held(), or mark_held() if any.
  bool held(int64_t slot) const {
    const uint32_t batch = last_batch(slot);
    return batch >= oldest_ && (in_order_ || batch == epoch_ || marks_[slot] == mark_);
  }
  // Whether the slots that are held are those last used by the batch oldest_in_flight() and later ones.
  bool in_order() const { return in_order_; }
  uint32_t oldest_in_flight() const { return oldest_; }
  void prepare_held() {  // throws std::bad_alloc
    if (!in_order_ && !marked_) mark_held();
  }

  // Slots of the batches in flight, without the current one. The bound counts a slot once per batch.
  int64_t held_at_most(int32_t table) const;
  void mark_held();  // throws std::bad_alloc
  bool marked(int64_t slot) const { return marks_[slot] == mark_; }
  int64_t marked_count(int32_t table) const { return table < int32_t(counts_.size()) ? counts_[table] : 0; }

 private:
  // Address space alone, until batches use it. Larger batches copy the stamps once.
  static constexpr int64_t kForeseenLookups = int64_t{1} << 24;

  void renumber();

  HugeArray<uint64_t> stamps_;
  int64_t slots_;
  uint32_t epoch_;
  uint32_t renumbered_ = 0;
  uint64_t held_plans_ = 0;              // since the start
  std::vector<PlanBuffers*> in_flight_;  // oldest first
  uint32_t oldest_ = 0;                  // epoch of the oldest batch in flight, or of the current one
  bool in_order_ = true;                 // every batch since the oldest in flight is in flight
  bool marked_ = false;                  // marks_ are of the current batch
  HugeArray<uint32_t> marks_;            // [slots] == mark_: held
  uint32_t mark_ = 0;
  std::vector<int64_t> counts_;  // [T] slots marked
};

}  // namespace rec_sdk
