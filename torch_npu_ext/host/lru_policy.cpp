#include "torch_npu_ext/host/lru_policy.h"

#include "torch_npu_ext/host/id_map.h"

namespace rec_sdk {
namespace {

constexpr uint32_t kPrefetchDistance = 16;

}  // namespace

// Room for four times the slots: compacting leaves at most one entry per slot, so it runs once per three
// times as many touches at most.
LruPolicy::LruPolicy(int64_t first_slot, int64_t slots)
    : first_slot_(static_cast<uint32_t>(first_slot)),
      capacity_(static_cast<uint32_t>(4 * slots + 1)),
      queue_(static_cast<size_t>(capacity_)),
      place_(static_cast<size_t>(slots)) {}

void LruPolicy::touch(const uint32_t* slots, int64_t count) noexcept {
  if (count > capacity_ - tail_) compact();
  for (int64_t i = 0; i < count; ++i) {
    if (i + kPrefetchDistance < count) prefetch_write(&place_[slots[i + kPrefetchDistance] - first_slot_]);
    const uint32_t slot = slots[i] - first_slot_;
    queue_[tail_] = slot;
    place_[slot] = tail_++;
  }
}

void LruPolicy::compact() noexcept {
  uint32_t end = 1;
  for (uint32_t p = head_; p < tail_; ++p) {
    if (p + kPrefetchDistance < tail_) prefetch_write(&place_[queue_[p + kPrefetchDistance]]);
    if (!live(p)) continue;
    const uint32_t slot = queue_[p];
    queue_[end] = slot;
    place_[slot] = end++;
  }
  head_ = 1;
  tail_ = end;
}

void LruPolicy::evict(int64_t count, const uint32_t* pins, uint32_t* victims) noexcept {
  uint32_t p = head_;
  for (int64_t found = 0; found < count; ++p) {
    if (p + kPrefetchDistance < tail_) prefetch_write(&place_[queue_[p + kPrefetchDistance]]);
    const uint32_t slot = queue_[p];
    if (!live(p) || pins[first_slot_ + slot] != 0) continue;
    place_[slot] = 0;
    victims[found++] = first_slot_ + slot;
  }
  // Pinned rows that were passed keep their order, right before what was not looked at.
  uint32_t end = p;
  while (p-- > head_) {
    if (!live(p)) continue;
    const uint32_t slot = queue_[p];
    queue_[--end] = slot;
    place_[slot] = end;
  }
  head_ = end;
}

void LruPolicy::forget(const uint32_t* slots, int64_t count) noexcept {
  for (int64_t i = 0; i < count; ++i) place_[slots[i] - first_slot_] = 0;
}

void LruPolicy::clear() noexcept {
  for (uint32_t p = head_; p < tail_; ++p) place_[queue_[p]] = 0;
  head_ = tail_ = 1;
}

}  // namespace rec_sdk
