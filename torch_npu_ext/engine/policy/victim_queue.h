// A queue of victims, in the order of a policy. Slots are not kept sorted. When victims are needed, a pass
// over all slots puts some of the first ones in that order into the queue, from which victims are taken until
// it is empty.
#pragma once

#include <algorithm>
#include <cstdint>
#include <utility>

#include "torch_npu_ext/engine/base/memory.h"
#include "torch_npu_ext/engine/directory/id_map.h"
#include "torch_npu_ext/engine/policy/slot_uses.h"

namespace rec_sdk {

// An Order has, for slots whose row the current batch does not use:
//   uint32_t key(uint32_t slot, uint32_t last_batch) const;  // smallest first, equal keys by slot
//   uint32_t base(uint32_t epoch) const;  // in most cases all keys are in [base, base + kBins)
//   bool deferred(uint32_t slot) const;   // a victim only if no other is left; its key is larger
//   std::pair<uint32_t, uint32_t> range(uint32_t first_slot, uint32_t end_slot) const;  // bounds of the keys
class VictimQueue {
 public:
  static constexpr uint32_t kBins = 4096;

  VictimQueue(int64_t first_slot, int64_t slots)
      : first_slot_(static_cast<uint32_t>(first_slot)),
        end_slot_(static_cast<uint32_t>(first_slot + slots)),
        queue_(static_cast<size_t>(slots)) {}

  // Chooses `count` victims; implements CachePolicy::evict().
  template <class Order>
  void evict(int64_t count, SlotUses* uses, const Order& order, uint32_t* victims) noexcept {
    if (renumbered_ != uses->renumbered()) clear();
    renumbered_ = uses->renumbered();
    const int64_t found =
        take(count, uses, victims, [&order](uint32_t slot) { return order.deferred(slot); });
    if (found == count) return;
    refill(count - found, *uses, order);
    take(count - found, uses, victims + found, [](uint32_t) { return false; });
  }
  void clear() noexcept { head_ = tail_ = 0; }

 private:
  static constexpr int64_t kPrefetchDistance = 16;
  // A refill examines all slots and queues at least 1/kQueuedShare of them. The cost is thus about eight
  // examined slots, consecutive in memory, per queued slot.
  static constexpr int64_t kQueuedShare = 8;

  // Bins into which slots are sorted by key. If there are more keys than bins, several keys share a bin.
  struct Bins {
    Bins(uint32_t lowest, uint32_t highest) : base(lowest) {
      while ((highest - lowest) >> shift >= kBins) ++shift;
    }
    uint32_t of(uint32_t key) const { return (key - base) >> shift; }

    uint32_t base;
    int shift = 0;
    uint32_t all[kBins] = {};   // number of slots; later, the end of the bin in the queue
    uint32_t free[kBins] = {};  // number of slots that are not pinned
  };

  // Returns whether the slot was used after it was queued.
  bool stale(const SlotUses& uses, uint32_t slot) const { return uses.last_batch(slot) - 1 >= queued_at_; }
  // Returns whether the slot has a row that the current batch does not use. Slots of the current batch are
  // never queued, because the rows that it has not swapped in yet would be missing from the order.
  static bool old(uint32_t last_batch, uint32_t epoch) { return last_batch - 1 < epoch - 1; }

  // take() and refill_few() are not inlined: inlined, plans with victims took 1.02 times as long.

  // Takes up to `count` victims from the queue and returns their number. Examined slots are removed from the
  // queue unless they are pinned. passed_over(slot) returns whether a slot must not become a victim now.
  template <class Passed>
  __attribute__((noinline)) int64_t take(int64_t count, SlotUses* uses, uint32_t* victims,
                                         const Passed& passed_over) noexcept {
    int64_t found = 0, passed = 0, p = head_;
    for (; p < tail_ && found < count; ++p) {
      if (p + kPrefetchDistance < tail_) prefetch(&uses->stamps()[queue_[p + kPrefetchDistance]]);
      const uint32_t slot = queue_[p];
      if (stale(*uses, slot) || passed_over(slot)) continue;
      if (uses->held(slot)) {
        queue_[head_ + passed++] = slot;
        continue;
      }
      uses->forget(slot);
      victims[found++] = slot;
    }
    // Pinned slots stay in the queue, in front of the slots that were not examined.
    std::copy_backward(queue_.data() + head_, queue_.data() + head_ + passed, queue_.data() + p);
    head_ = p - passed;
    return found;
  }

  // Fills the queue with the first slots in the order, until `wanted` of them are not pinned.
  template <class Order>
  void refill(int64_t wanted, const SlotUses& uses, const Order& order) noexcept {
    wanted = std::max(wanted, (end_slot_ - first_slot_) / kQueuedShare);
    queued_at_ = uses.epoch() - 1;
    if (uses.in_order() ? refill_few<true>(wanted, uses, order) : refill_few<false>(wanted, uses, order))
      return;
    refill_many(wanted, uses, order);
  }

  // Refills the queue in the common case of one key per bin, in two passes without branches that depend on
  // the slot. If a key is outside of [base, base + kBins), returns false and leaves the queue as it is.
  // kInOrder: uses.in_order().
  template <bool kInOrder, class Order>
  __attribute__((noinline)) bool refill_few(int64_t wanted, const SlotUses& uses, Order order) noexcept {
    const uint32_t epoch = uses.epoch(), oldest = uses.oldest_in_flight(), base = order.base(epoch);
    const uint64_t* const stamps = uses.stamps();
    // The low 32 bits count the rows of a bin, and the high 32 bits its rows that are not pinned. The last
    // bin counts keys out of range.
    uint64_t bins[kBins + 1] = {};
    const auto bin_of = [&](uint32_t slot, uint32_t batch) __attribute__((always_inline)) {
      return std::min(order.key(slot, batch) - base, kBins);
    };
    for (uint32_t slot = first_slot_; slot < end_slot_; ++slot) {
      const auto batch = static_cast<uint32_t>(stamps[slot] >> 32);
      const bool there = old(batch, epoch);
      const bool free = kInOrder ? old(batch, oldest) : there && !uses.held(slot);
      bins[bin_of(slot, batch)] += uint64_t{there} | uint64_t{free} << 32;
    }
    if (bins[kBins] != 0) return false;
    uint32_t end_bin = 0, queued = 0;
    for (int64_t free = 0; end_bin < kBins && free < wanted; ++end_bin) {
      free += static_cast<int64_t>(bins[end_bin] >> 32);
      const auto rows = static_cast<uint32_t>(bins[end_bin]);
      bins[end_bin] = queued;  // from now on, the position of the bin's next row
      queued += rows;
    }
    // Slots that are not queued are written to the position behind the queue, where they are overwritten or
    // ignored.
    bins[end_bin] = std::min(queued, end_slot_ - first_slot_ - 1);
    uint32_t* const queue = queue_.data();
    for (uint32_t slot = first_slot_; slot < end_slot_; ++slot) {
      const auto batch = static_cast<uint32_t>(stamps[slot] >> 32);
      const uint32_t bin = old(batch, epoch) ? std::min(bin_of(slot, batch), end_bin) : end_bin;
      queue[bins[bin]] = slot;
      bins[bin] += bin < end_bin;
    }
    head_ = 0;
    tail_ = queued;
    return true;
  }

  template <class Order>
  __attribute__((noinline)) void refill_many(int64_t wanted, const SlotUses& uses,
                                             const Order& order) noexcept {
    const uint32_t epoch = uses.epoch();
    const std::pair<uint32_t, uint32_t> range = order.range(first_slot_, end_slot_);
    Bins bins(range.first, range.second);
    for (uint32_t slot = first_slot_; slot < end_slot_; ++slot) {
      const uint32_t batch = uses.last_batch(slot);
      if (!old(batch, epoch)) continue;
      const uint32_t bin = bins.of(order.key(slot, batch));
      ++bins.all[bin];
      bins.free[bin] += !uses.held(slot);
    }
    uint32_t end_bin = 0;
    uint32_t queued = 0;
    for (int64_t free = 0; end_bin < kBins && free < wanted; ++end_bin) {
      free += bins.free[end_bin];
      queued += std::exchange(bins.all[end_bin], queued);
    }
    for (uint32_t slot = first_slot_; slot < end_slot_; ++slot) {
      const uint32_t batch = uses.last_batch(slot);
      if (!old(batch, epoch)) continue;
      const uint32_t bin = bins.of(order.key(slot, batch));
      if (bin < end_bin) queue_[bins.all[bin]++] = slot;
    }
    const auto earlier = [&](uint32_t a, uint32_t b) {
      return std::make_pair(order.key(a, uses.last_batch(a)), a) <
             std::make_pair(order.key(b, uses.last_batch(b)), b);
    };
    for (uint32_t bin = 0, begin = 0; bins.shift > 0 && bin < end_bin; begin = bins.all[bin++]) {
      std::sort(queue_.data() + begin, queue_.data() + bins.all[bin], earlier);
    }
    head_ = 0;
    tail_ = queued;
  }

  uint32_t first_slot_;
  uint32_t end_slot_;
  HugeArray<uint32_t> queue_;  // [slots] the next victim first; memory is committed on first use
  int64_t head_ = 0;
  int64_t tail_ = 0;
  uint32_t queued_at_ = 0;  // the last batch before the queue was refilled
  uint32_t renumbered_ = 0;
};

}  // namespace rec_sdk
