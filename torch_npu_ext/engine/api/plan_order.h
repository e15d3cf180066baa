// The queue of plans that are not applied yet, and the released plans that the group has not processed yet.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "torch_npu_ext/engine/batch/plan_buffers.h"

namespace rec_sdk {

// The unapplied plans, oldest first. The queue has its own mutex, which is held only briefly: a thread that
// applies or releases a plan does not wait for a thread that is planning. LockedGroup::catch_up() transfers
// the changes to the group.
class PlanOrder {
 public:
  using Buffers = std::shared_ptr<PlanBuffers>;
  using Guard = std::lock_guard<std::mutex>;

  // Any thread may call these functions. They throw std::runtime_error.
  template <class Keep>  // calls keep() if the plan is the oldest, and returns whether it is
  bool keep_next(const PlanBuffers& plan, const Keep& keep) {
    const Guard guard(mutex_);
    if (!is_next(plan)) return false;
    keep();
    return true;
  }
  bool is_next_planned(const PlanBuffers& plan) const {  // whether it is the oldest and not started
    const Guard guard(mutex_);
    return is_next(plan) && plan.state == PlanState::kPlanned;
  }
  void check_next(const PlanBuffers& plan);  // throws unless the plan is the oldest or applied
  void begin(PlanBuffers* plan) noexcept {   // kPlanned -> kApplying
    const Guard guard(mutex_);
    if (plan->state == PlanState::kPlanned) plan->state = PlanState::kApplying;
  }
  void applied(PlanBuffers* plan);  // kApplying -> kApplied; throws unless the plan is the oldest
  void end_later(Buffers plan) {    // queues a plan whose handle was released
    const Guard guard(mutex_);
    ended_.push_back(std::move(plan));
  }
  void forget_later(uint64_t ticket) {  // queues the ticket of a withdrawn announcement
    const Guard guard(mutex_);
    forgotten_.push_back(ticket);
  }

  // The caller of these functions holds the engine's mutex.
  void add(const Buffers& plan) {  // adds the newest plan; throws std::bad_alloc
    const Guard guard(mutex_);
    plans_.push_back(plan);
  }
  void take_back() noexcept {  // removes the newest plan, whose planning failed
    const Guard guard(mutex_);
    plans_.pop_back();
  }
  Buffers cancel_newest() noexcept {  // kPlanned -> kCancelled; returns null in another state
    const Guard guard(mutex_);
    return cancel();
  }
  Buffers cancel_released() noexcept;  // cancels the newest plan if it was released and no handle keeps it
  Buffers take_applied() noexcept;     // removes and returns the oldest applied plan, or null
  std::vector<Buffers> take_ended() noexcept {
    const Guard guard(mutex_);
    return std::exchange(ended_, {});
  }
  std::vector<uint64_t> take_forgotten() noexcept {
    const Guard guard(mutex_);
    return std::exchange(forgotten_, {});
  }
  bool is_newest(const PlanBuffers& plan) const {
    const Guard guard(mutex_);
    return !plans_.empty() && plans_.back().get() == &plan;
  }
  size_t size() const {  // includes applied plans that take_applied() has not returned yet
    const Guard guard(mutex_);
    return plans_.size();
  }
  bool empty() const { return size() == 0; }
  template <class Visit>  // calls visit(plan) for each unapplied plan, oldest first
  void for_each(const Visit& visit) const {
    const Guard guard(mutex_);
    for (size_t i = applied_; i < plans_.size(); ++i) visit(plans_[i]);
  }

 private:
  bool is_next(const PlanBuffers& plan) const {
    return applied_ < plans_.size() && plans_[applied_].get() == &plan;
  }
  Buffers cancel() noexcept;

  mutable std::mutex mutex_;
  std::deque<Buffers> plans_;  // oldest first
  size_t applied_ =
      0;  // the number of plans at the front that are applied, but not yet returned by take_applied()
  std::vector<Buffers> ended_;
  std::vector<uint64_t> forgotten_;
};

}  // namespace rec_sdk
