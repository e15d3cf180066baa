#include "torch_npu_ext/engine/policy/lru_policy.h"

#include <algorithm>

namespace rec_sdk {
namespace {

struct LastBatch {
  const SlotUses& uses;
  static uint32_t key(uint32_t, uint32_t last_batch) { return last_batch; }
  static bool waits(uint32_t) { return false; }
  std::pair<uint32_t, uint32_t> range(uint32_t first_slot, uint32_t end_slot) const {
    uint32_t oldest = uses.epoch();
    for (uint32_t slot = first_slot; slot < end_slot; ++slot) {
      oldest = std::min(oldest, uses.last_batch(slot) - 1);  // 0, no row, becomes the largest number
    }
    return {oldest, uses.epoch()};
  }
};

}  // namespace

void LruPolicy::evict(int64_t count, SlotUses* uses, const FutureUses&, uint32_t* victims) noexcept {
  queue_.evict(count, uses, LastBatch{*uses}, victims);
}

}  // namespace rec_sdk
