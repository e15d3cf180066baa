// LRFU with look-ahead: a row that an announced batch needs becomes a victim only if no other rows are left;
// then the row that is needed last is evicted first.
#include "torch_npu_ext/engine/policy/lrfu_policy.h"

namespace rec_sdk {
namespace {

struct ByNeedAndScore {
  ByScore by_score;
  const FutureUses& future;
  uint32_t key(uint32_t slot, uint32_t last_batch) const {
    const uint32_t distance = future.distance(slot);
    return distance == FutureUses::kNever ? by_score.key(slot, last_batch)
                                          : ByScore::kMost + FutureUses::kNever - distance;
  }
  static uint32_t base(uint32_t) { return 0; }
  bool deferred(uint32_t slot) const { return future.distance(slot) != FutureUses::kNever; }
  static std::pair<uint32_t, uint32_t> range(uint32_t, uint32_t) {
    return {0, ByScore::kMost + FutureUses::kNever};
  }
};

class LookAheadPolicy final : public LrfuPolicy {
 public:
  using LrfuPolicy::LrfuPolicy;
  void evict(int64_t count, SlotUses* uses, const FutureUses& future, uint32_t* victims) noexcept override;
  bool looks_ahead() const override { return true; }
};

void LookAheadPolicy::evict(int64_t count, SlotUses* uses, const FutureUses& future,
                            uint32_t* victims) noexcept {
  begin_counting(*uses);
  queue_.evict(count, uses, ByNeedAndScore{{scores()}, future}, victims);
}

}  // namespace

std::unique_ptr<CachePolicy> make_look_ahead_policy(int64_t first_slot, int64_t slots) {
  return std::make_unique<LookAheadPolicy>(first_slot, slots);
}

}  // namespace rec_sdk
