// The plans that are not applied yet, in their order, and what was let go since the engine's last call.
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

// Its mutex is its own, and held for moments: a thread that applies a plan or drops one does not wait for
// another that makes one. The next call that locks the engine tells the group of it.
class PlanOrder {
 public:
  using Buffers = std::shared_ptr<PlanBuffers>;
  using Guard = std::lock_guard<std::mutex>;

  // By any thread. The exception, where one is thrown, is std::runtime_error.
  template <class Keep>  // calls keep() if the plan is the oldest; whether it is
  bool keep_next(const PlanBuffers& plan, const Keep& keep) {
    const Guard guard(mutex_);
    if (!is_next(plan)) return false;
    keep();
    return true;
  }
  bool is_next_planned(const PlanBuffers& plan) const {  // the oldest, and it has not begun
    const Guard guard(mutex_);
    return is_next(plan) && plan.state == PlanState::kPlanned;
  }
  void check_next(const PlanBuffers& plan);  // throws unless it is the oldest, or applied
  void begin(PlanBuffers* plan) noexcept {   // kPlanned -> kApplying
    const Guard guard(mutex_);
    if (plan->state == PlanState::kPlanned) plan->state = PlanState::kApplying;
  }
  void applied(PlanBuffers* plan);  // kApplying -> kApplied; throws unless it is the oldest
  void end_later(Buffers plan) {    // nothing holds it any more
    const Guard guard(mutex_);
    ended_.push_back(std::move(plan));
  }
  void forget_later(uint64_t ticket) {  // of an announcement
    const Guard guard(mutex_);
    forgotten_.push_back(ticket);
  }

  // Under the engine's mutex.
  void add(const Buffers& plan) {  // the newest; throws std::bad_alloc
    const Guard guard(mutex_);
    plans_.push_back(plan);
  }
  void take_back() noexcept {  // the newest, which could not be made
    const Guard guard(mutex_);
    plans_.pop_back();
  }
  Buffers cancel_newest() noexcept {  // kPlanned -> kCancelled; null if that is not its state
    const Guard guard(mutex_);
    return cancel();
  }
  Buffers cancel_released() noexcept;  // the same, of one that has ended and that nothing keeps
  Buffers take_applied() noexcept;     // the oldest that was not taken yet, or null
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
  size_t size() const {  // with those applied that were not taken yet
    const Guard guard(mutex_);
    return plans_.size();
  }
  bool empty() const { return size() == 0; }
  template <class Visit>  // visit(plan) of each, oldest first
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
  size_t applied_ = 0;         // so many of them, the first, are applied: the group has yet to learn it
  std::vector<Buffers> ended_;
  std::vector<uint64_t> forgotten_;
};

}  // namespace rec_sdk
