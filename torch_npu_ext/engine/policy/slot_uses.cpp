#include "torch_npu_ext/engine/policy/slot_uses.h"

#include <algorithm>
#include <limits>

namespace rec_sdk {

void SlotUses::begin_batch(int64_t lookups) {
  const size_t needed = static_cast<size_t>(slots_ + lookups);
  if (needed > stamps_.size()) {
    HugeArray<uint64_t> longer(needed + static_cast<size_t>(lookups) / 4);
    std::copy_n(stamps_.data(), slots_, longer.data());
    stamps_ = std::move(longer);
  }
  if (in_flight_.size() == in_flight_.capacity())
    in_flight_.reserve(2 * in_flight_.size() + 8);  // so that hold() cannot fail
  if (epoch_ == std::numeric_limits<uint32_t>::max()) renumber();
  ++epoch_;
  oldest_ = in_flight_.empty() ? epoch_ : in_flight_.front()->epoch;
  in_order_ = in_flight_.empty() || held_plans_ - in_flight_.front()->serial + 1 == in_flight_.size();
  marked_ = false;
}

// Renumbers the epochs after 2^32 batches. All uses by batches that are not in flight get the same epoch.
void SlotUses::renumber() {
  const uint64_t old = uint64_t{1} << 32;
  for (int64_t slot = 0; slot < slots_; ++slot) stamps_[slot] = stamps_[slot] == 0 ? 0 : old;
  std::fill(stamps_.data() + slots_, stamps_.data() + stamps_.size(), 0);
  epoch_ = 1;
  ++renumbered_;
  for (PlanBuffers* plan : in_flight_) {
    plan->epoch = ++epoch_;
    for (int64_t u = 0; u < plan->uniques; ++u) touch(plan->unique_slots[u]);
  }
}

void SlotUses::hold(PlanBuffers* plan) noexcept {
  plan->epoch = epoch_;
  plan->serial = ++held_plans_;
  in_flight_.push_back(plan);
}

void SlotUses::release(const PlanBuffers& plan) noexcept {
  in_flight_.erase(std::find(in_flight_.begin(), in_flight_.end(), &plan));
}

int64_t SlotUses::held_at_most(int32_t table) const {
  int64_t held = 0;
  for (const PlanBuffers* plan : in_flight_)
    held += plan->table_offsets[table + 1] - plan->table_offsets[table];
  return held;
}

void SlotUses::mark_held() {
  marks_.ensure(static_cast<size_t>(slots_));
  counts_.assign(in_flight_.empty() ? 0 : in_flight_.front()->table_offsets.size() - 1, 0);
  if (++mark_ == 0) {
    marks_ = HugeArray<uint32_t>(static_cast<size_t>(slots_));
    mark_ = 1;
  }
  for (const PlanBuffers* plan : in_flight_) {
    for (size_t t = 0; t < counts_.size(); ++t) {
      for (int32_t u = plan->table_offsets[t]; u < plan->table_offsets[t + 1]; ++u) {
        uint32_t& mark = marks_[plan->unique_slots[u]];
        counts_[t] += mark != mark_;
        mark = mark_;
      }
    }
  }
  marked_ = true;
}

}  // namespace rec_sdk
