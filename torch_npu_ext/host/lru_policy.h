// Least recently used first, by batches; rows that the same batch used last leave in the order of their
// slots. No order is kept: when rows must leave, a pass over the slots sorts some of the oldest into a queue,
// which serves until it is used up.
#pragma once

#include "torch_npu_ext/host/cache_policy.h"
#include "torch_npu_ext/host/memory.h"

namespace rec_sdk {

class LruPolicy final : public CachePolicy {
 public:
  LruPolicy(int64_t first_slot, int64_t slots);

  void evict(int64_t count, SlotUses* uses, uint32_t* victims) noexcept override;
  void clear() noexcept override { head_ = tail_ = 0; }

 private:
  // Whether the slot has not been used since it was queued.
  bool stale(const SlotUses& uses, uint32_t slot) const { return uses.last_batch(slot) - 1 >= queued_at_; }
  int64_t take(int64_t count, SlotUses* uses, uint32_t* victims) noexcept;
  void refill(int64_t wanted, const SlotUses& uses) noexcept;

  uint32_t first_slot_;
  uint32_t end_slot_;
  HugeArray<uint32_t> queue_;  // [slots] oldest first; committed as far as it was ever filled
  int64_t head_ = 0;
  int64_t tail_ = 0;
  uint32_t queued_at_ = 0;  // the last batch before the queue was filled
  uint32_t renumbered_ = 0;
};

}  // namespace rec_sdk
