#include "torch_npu_ext/engine/api/plan_order.h"

#include <stdexcept>
#include <utility>

namespace rec_sdk {

using Guard = std::lock_guard<std::mutex>;

bool PlanOrder::is_next_planned(const PlanBuffers& plan) const {
  const Guard guard(mutex_);
  return is_next(plan) && plan.state == PlanState::kPlanned;
}

void PlanOrder::check_next(const PlanBuffers& plan) {
  const Guard guard(mutex_);
  if (plan.state == PlanState::kApplied || is_next(plan)) return;
  throw std::runtime_error("plans are applied once each, in their order");
}

void PlanOrder::begin(PlanBuffers* plan) noexcept {
  const Guard guard(mutex_);
  if (plan->state == PlanState::kPlanned) plan->state = PlanState::kApplying;
}

void PlanOrder::applied(PlanBuffers* plan) {
  const Guard guard(mutex_);
  if (!is_next(*plan) || plan->state != PlanState::kApplying) {
    throw std::runtime_error("the plan has not begun to be applied");
  }
  plan->state = PlanState::kApplied;
  ++applied_;
}

void PlanOrder::end_later(Buffers plan) {
  const Guard guard(mutex_);
  ended_.push_back(std::move(plan));
}

void PlanOrder::forget_later(uint64_t ticket) {
  const Guard guard(mutex_);
  forgotten_.push_back(ticket);
}

void PlanOrder::add(const Buffers& plan) {
  const Guard guard(mutex_);
  plans_.push_back(plan);
}

void PlanOrder::take_back() noexcept {
  const Guard guard(mutex_);
  plans_.pop_back();
}

PlanOrder::Buffers PlanOrder::cancel() noexcept {
  if (applied_ == plans_.size() || plans_.back()->state != PlanState::kPlanned) return nullptr;
  Buffers plan = std::move(plans_.back());
  plans_.pop_back();
  plan->state = PlanState::kCancelled;
  return plan;
}

PlanOrder::Buffers PlanOrder::cancel_newest() noexcept {
  const Guard guard(mutex_);
  return cancel();
}

PlanOrder::Buffers PlanOrder::cancel_released() noexcept {
  const Guard guard(mutex_);
  const bool released = !plans_.empty() && plans_.back()->ended && plans_.back()->kept == 0;
  return released ? cancel() : nullptr;
}

PlanOrder::Buffers PlanOrder::take_applied() noexcept {
  const Guard guard(mutex_);
  if (applied_ == 0) return nullptr;
  Buffers plan = std::move(plans_.front());
  plans_.pop_front();
  --applied_;
  return plan;
}

std::vector<PlanOrder::Buffers> PlanOrder::take_ended() noexcept {
  const Guard guard(mutex_);
  return std::exchange(ended_, {});
}

std::vector<uint64_t> PlanOrder::take_forgotten() noexcept {
  const Guard guard(mutex_);
  return std::exchange(forgotten_, {});
}

bool PlanOrder::is_newest(const PlanBuffers& plan) const {
  const Guard guard(mutex_);
  return !plans_.empty() && plans_.back().get() == &plan;
}

size_t PlanOrder::size() const {
  const Guard guard(mutex_);
  return plans_.size();
}

}  // namespace rec_sdk
