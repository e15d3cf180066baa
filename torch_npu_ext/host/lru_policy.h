// Exact least-recently-used order, with sequential work only: a queue in which a touched slot is appended
// again and its older place goes stale. Amortised O(1) per touched or evicted row.
#pragma once

#include "torch_npu_ext/host/cache_policy.h"
#include "torch_npu_ext/host/memory.h"

namespace rec_sdk {

class LruPolicy final : public CachePolicy {
 public:
  LruPolicy(int64_t first_slot, int64_t slots);

  void touch(const uint32_t* slots, int64_t count) noexcept override;
  void evict(int64_t count, const uint32_t* pins, uint32_t* victims) noexcept override;
  void forget(const uint32_t* slots, int64_t count) noexcept override;
  void clear() noexcept override;

 private:
  bool live(uint32_t position) const { return place_[queue_[position]] == position; }
  void compact() noexcept;

  uint32_t first_slot_;
  uint32_t capacity_;
  HugeArray<uint32_t> queue_;  // [capacity] slots - first_slot, oldest first
  HugeArray<uint32_t> place_;  // [slots] position of the slot's live entry in the queue; 0 = none
  uint32_t head_ = 1;          // position 0 is never used, so that zeroed memory means 'none'
  uint32_t tail_ = 1;
};

}  // namespace rec_sdk
