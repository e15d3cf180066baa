// Least frequently used first: by the number of batches that used a row since it came, the least recently
// used of equal ones first. All counts are halved whenever uses amount to eight for each slot, so that what
// was hot long ago leaves in the end.
#pragma once

#include "torch_npu_ext/engine/policy/cache_policy.h"
#include "torch_npu_ext/engine/policy/victim_queue.h"

namespace rec_sdk {

class LfuPolicy final : public CachePolicy {
 public:
  LfuPolicy(int64_t first_slot, int64_t slots)
      : first_slot_(first_slot),
        slots_(slots),
        counts_(static_cast<size_t>(slots)),
        queue_(first_slot, slots) {}

  void evict(int64_t count, SlotUses* uses, const FutureUses& future, uint32_t* victims) noexcept override;
  void enter(const uint32_t* slots, const uint32_t* rows, int64_t count) noexcept override;
  void touch(const uint32_t* slots, int64_t count) noexcept override;
  void clear() noexcept override { queue_.clear(); }  // counts begin when a row enters

 private:
  int64_t first_slot_;
  int64_t slots_;
  HugeArray<uint8_t> counts_;  // [slots] of batches, at most kMost
  VictimQueue queue_;
  int64_t uses_ = 0;        // since counts were halved
  int64_t batch_rows_ = 1;  // of the latest batch
};

}  // namespace rec_sdk
