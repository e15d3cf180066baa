// Least recently used first, by batches; rows that the same batch used last leave in the order of their
// slots.
#pragma once

#include "torch_npu_ext/engine/policy/cache_policy.h"
#include "torch_npu_ext/engine/policy/victim_queue.h"

namespace rec_sdk {

class LruPolicy final : public CachePolicy {
 public:
  LruPolicy(int64_t first_slot, int64_t slots) : queue_(first_slot, slots) {}

  void evict(int64_t count, SlotUses* uses, const FutureUses& future, uint32_t* victims) noexcept override;
  void clear() noexcept override { queue_.clear(); }

 private:
  VictimQueue queue_;
};

}  // namespace rec_sdk
