#include "torch_npu_ext/host/lru_policy.h"

#include <algorithm>
#include <limits>

#include "torch_npu_ext/host/id_map.h"

namespace rec_sdk {
namespace {

constexpr int64_t kPrefetchDistance = 16;
constexpr uint32_t kBins = 4096;
// A refill looks at every slot, and this share of them is queued at least: eight slots looked at, one after
// the other in memory, for a row that leaves or is used again.
constexpr int64_t kQueuedShare = 8;

// Slots by the batch that used them last, several batches to a bin where there are too many.
struct Bins {
  Bins(uint32_t oldest, uint32_t newest) : base(oldest) {
    while ((newest - oldest) >> shift >= kBins) ++shift;
  }
  uint32_t of(uint32_t batch) const { return (batch - base) >> shift; }

  uint32_t base;
  int shift = 0;
  uint32_t all[kBins] = {};   // slots; later the end of the bin in the queue
  uint32_t free[kBins] = {};  // those not held
};

}  // namespace

LruPolicy::LruPolicy(int64_t first_slot, int64_t slots)
    : first_slot_(static_cast<uint32_t>(first_slot)),
      end_slot_(static_cast<uint32_t>(first_slot + slots)),
      queue_(static_cast<size_t>(slots)) {}

void LruPolicy::evict(int64_t count, SlotUses* uses, uint32_t* victims) noexcept {
  if (renumbered_ != uses->renumbered()) clear();
  renumbered_ = uses->renumbered();
  int64_t found = take(count, uses, victims);
  if (found == count) return;
  refill(count - found, *uses);
  take(count - found, uses, victims + found);
}

// From the queue, `count` or as many as it has.
int64_t LruPolicy::take(int64_t count, SlotUses* uses, uint32_t* victims) noexcept {
  int64_t found = 0, passed = 0, p = head_;
  for (; p < tail_ && found < count; ++p) {
    if (p + kPrefetchDistance < tail_) rec_sdk::prefetch(&uses->stamps()[queue_[p + kPrefetchDistance]]);
    const uint32_t slot = queue_[p];
    if (stale(*uses, slot)) continue;
    if (uses->held(slot)) {
      queue_[head_ + passed++] = slot;
      continue;
    }
    uses->forget(slot);
    victims[found++] = slot;
  }
  // Held rows that were passed keep their place, right before what was not looked at.
  std::copy_backward(queue_.data() + head_, queue_.data() + head_ + passed, queue_.data() + p);
  head_ = p - passed;
  return found;
}

// Queues the oldest rows, so many that `wanted` of them are not held. Those of the current batch are not
// queued: it has yet to bring in others, which would be missing among them.
void LruPolicy::refill(int64_t wanted, const SlotUses& uses) noexcept {
  const auto old = [&uses](uint32_t batch) { return batch != 0 && batch != uses.epoch(); };
  uint32_t oldest = uses.epoch();
  for (uint32_t slot = first_slot_; slot < end_slot_; ++slot) {
    oldest = std::min(oldest, uses.last_batch(slot) - 1);  // 0, no row, becomes the largest number
  }
  Bins bins(oldest, uses.epoch());
  for (uint32_t slot = first_slot_; slot < end_slot_; ++slot) {
    const uint32_t batch = uses.last_batch(slot);
    if (!old(batch)) continue;
    ++bins.all[bins.of(batch)];
    bins.free[bins.of(batch)] += !uses.held(slot);
  }
  wanted = std::max(wanted, (end_slot_ - first_slot_) / kQueuedShare);
  uint32_t end_bin = 0;
  uint32_t queued = 0;
  for (int64_t free = 0; end_bin < kBins && free < wanted; ++end_bin) {
    free += bins.free[end_bin];
    queued += std::exchange(bins.all[end_bin], queued);
  }
  for (uint32_t slot = first_slot_; slot < end_slot_; ++slot) {
    const uint32_t batch = uses.last_batch(slot);
    if (old(batch) && bins.of(batch) < end_bin) queue_[bins.all[bins.of(batch)]++] = slot;
  }
  const auto earlier = [&uses](uint32_t a, uint32_t b) {
    return std::make_pair(uses.last_batch(a), a) < std::make_pair(uses.last_batch(b), b);
  };
  for (uint32_t bin = 0, begin = 0; bins.shift > 0 && bin < end_bin; begin = bins.all[bin++]) {
    std::sort(queue_.data() + begin, queue_.data() + bins.all[bin], earlier);
  }
  head_ = 0;
  tail_ = queued;
  queued_at_ = uses.epoch() - 1;
}

}  // namespace rec_sdk
