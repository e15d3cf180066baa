// LFU (least frequently used): victims are the rows that the fewest batches have used since they were cached,
// and among these the least recently used. All counts are halved whenever there were eight uses per slot, so
// that rows that are no longer hot are evicted eventually.
#include <algorithm>
#include <cmath>

#include "torch_npu_ext/engine/policy/cache_policy.h"
#include "torch_npu_ext/engine/policy/victim_queue.h"

namespace rec_sdk {
namespace {

constexpr uint8_t kMost =
    63;  // counts saturate here: rows with larger counts would not become victims either
constexpr int64_t kUsesPerSlot = 8;
// The age of a row is counted in 64 steps of 2^shift batches. The batches of one step fill at most 1/8 of the
// cache. Together, count and age have as many values as the queue has bins.
constexpr int kAgeBits = 6;
constexpr uint32_t kOldest = (1u << kAgeBits) - 1;
constexpr int64_t kStepsPerFill = 8;

struct CountAndAge {
  uint32_t epoch;
  const uint8_t* counts;  // indexed from slot 0
  int shift;              // log2 of the number of batches per step
  uint32_t key(uint32_t slot, uint32_t last_batch) const {
    const uint32_t age = (epoch - last_batch) >> shift;
    return static_cast<uint32_t>(counts[slot]) << kAgeBits | (kOldest - std::min(age, kOldest));
  }
  static uint32_t base(uint32_t) { return 0; }
  static bool deferred(uint32_t) { return false; }
  static std::pair<uint32_t, uint32_t> range(uint32_t, uint32_t) {
    return {0, static_cast<uint32_t>(kMost) << kAgeBits | kOldest};
  }
};

class LfuPolicy final : public CachePolicy {
 public:
  LfuPolicy(int64_t first_slot, int64_t slots)
      : first_slot_(first_slot),
        slots_(slots),
        counts_(static_cast<size_t>(slots)),
        queue_(first_slot, slots) {}

  void evict(int64_t count, SlotUses* uses, const FutureUses& future, uint32_t* victims) noexcept override;
  void insert(const uint32_t* slots, const uint32_t* rows, int64_t count) noexcept override;
  void touch(const uint32_t* slots, int64_t count) noexcept override;
  float heat(uint32_t slot, const SlotUses&) const noexcept override { return counts_[slot - first_slot_]; }
  void warm(const uint32_t* slots, const float* heats, int64_t count, const SlotUses&) noexcept override;
  void clear() noexcept override { queue_.clear(); }  // counts need no clearing: insert() sets them to 0

 private:
  int64_t first_slot_;
  int64_t slots_;
  HugeArray<uint8_t> counts_;  // [slots] number of batches that used the row, at most kMost
  VictimQueue queue_;
  int64_t uses_ = 0;        // number of uses since the counts were last halved
  int64_t batch_rows_ = 1;  // number of unique rows of the latest batch
};

void LfuPolicy::evict(int64_t count, SlotUses* uses, const FutureUses&, uint32_t* victims) noexcept {
  int shift = 0;
  while ((batch_rows_ << (shift + 1)) * kStepsPerFill <= slots_) ++shift;
  queue_.evict(count, uses, CountAndAge{uses->epoch(), counts_.data() - first_slot_, shift}, victims);
}

void LfuPolicy::insert(const uint32_t* slots, const uint32_t*, int64_t count) noexcept {
  for (int64_t i = 0; i < count; ++i) counts_[slots[i] - first_slot_] = 0;
}

void LfuPolicy::touch(const uint32_t* slots, int64_t count) noexcept {
  for (int64_t i = 0; i < count; ++i) {
    uint8_t& uses = counts_[slots[i] - first_slot_];
    uses += uses < kMost;
  }
  batch_rows_ = std::max<int64_t>(1, count);
  uses_ += count;
  if (uses_ < kUsesPerSlot * slots_) return;
  uses_ = 0;
  for (int64_t i = 0; i < slots_; ++i) counts_[i] >>= 1;
}

void LfuPolicy::warm(const uint32_t* slots, const float* heats, int64_t count, const SlotUses&) noexcept {
  for (int64_t i = 0; i < count; ++i) {
    const float most = std::min(heats[i], static_cast<float>(kMost));
    counts_[slots[i] - first_slot_] = static_cast<uint8_t>(std::lround(most));
  }
}

}  // namespace

std::unique_ptr<CachePolicy> make_lfu_policy(int64_t first_slot, int64_t slots) {
  return std::make_unique<LfuPolicy>(first_slot, slots);
}

}  // namespace rec_sdk
