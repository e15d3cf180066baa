// LRU (least recently used): victims are the rows whose last batch is the oldest, and among these the rows in
// the lowest slots.
#include <algorithm>

#include "torch_npu_ext/engine/policy/cache_policy.h"
#include "torch_npu_ext/engine/policy/victim_queue.h"

namespace rec_sdk {
namespace {

struct LastBatch {
  const SlotUses& uses;
  static uint32_t key(uint32_t, uint32_t last_batch) { return last_batch; }
  static uint32_t base(uint32_t epoch) {
    return epoch < VictimQueue::kBins ? 1 : epoch - VictimQueue::kBins + 1;
  }
  static bool deferred(uint32_t) { return false; }
  std::pair<uint32_t, uint32_t> range(uint32_t first_slot, uint32_t end_slot) const {
    uint32_t oldest = uses.epoch();
    for (uint32_t slot = first_slot; slot < end_slot; ++slot) {
      oldest =
          std::min(oldest, uses.last_batch(slot) - 1);  // 0 means no row; 0 - 1 wraps around to the maximum
    }
    return {oldest, uses.epoch()};
  }
};

class LruPolicy final : public CachePolicy {
 public:
  LruPolicy(int64_t first_slot, int64_t slots) : queue_(first_slot, slots) {}

  void evict(int64_t count, SlotUses* uses, const FutureUses& future, uint32_t* victims) noexcept override;
  void clear() noexcept override { queue_.clear(); }

 private:
  VictimQueue queue_;
};

void LruPolicy::evict(int64_t count, SlotUses* uses, const FutureUses&, uint32_t* victims) noexcept {
  queue_.evict(count, uses, LastBatch{*uses}, victims);
}

}  // namespace

std::unique_ptr<CachePolicy> make_lru_policy(int64_t first_slot, int64_t slots) {
  return std::make_unique<LruPolicy>(first_slot, slots);
}

}  // namespace rec_sdk
