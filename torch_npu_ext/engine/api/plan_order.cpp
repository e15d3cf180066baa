#include "torch_npu_ext/engine/api/plan_order.h"

#include <stdexcept>
#include <utility>

namespace rec_sdk {

void PlanOrder::check_next(const PlanBuffers& plan) {
  const Guard guard(mutex_);
  if (plan.state == PlanState::kApplied || is_next(plan)) return;
  throw std::runtime_error("plans are applied once each, in their order");
}

void PlanOrder::applied(PlanBuffers* plan) {
  const Guard guard(mutex_);
  if (!is_next(*plan) || plan->state != PlanState::kApplying) {
    throw std::runtime_error("the plan was not started");
  }
  plan->state = PlanState::kApplied;
  ++applied_;
}

PlanOrder::Buffers PlanOrder::cancel() noexcept {
  if (applied_ == plans_.size() || plans_.back()->state != PlanState::kPlanned) return nullptr;
  Buffers plan = std::move(plans_.back());
  plans_.pop_back();
  plan->state = PlanState::kCancelled;
  return plan;
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

}  // namespace rec_sdk
