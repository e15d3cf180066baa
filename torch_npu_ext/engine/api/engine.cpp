#include "torch_npu_ext/engine/api/engine.h"

#include <stdexcept>

namespace rec_sdk {

// Only queues the plan; the next call of the engine unpins its slots. Python's garbage collector may delete a
// plan while another thread holds the engine's lock for planning, and release() must not wait for it.
void Plan::release() noexcept {
  if (!released_.exchange(true)) shared_->order.end_later(buffers_);
}

bool Plan::written_back() const {
  const auto guard = shared_->lock();
  return shared_->group.write_backs.find(buffers_->serial) != buffers_;
}

std::unique_ptr<Plan> Plan::next() const {
  auto handle = std::make_unique<Plan>(shared_, buffers_, false);
  if (!shared_->order.keep_next(*buffers_, [&handle] { handle->keep(); })) return nullptr;
  return handle;
}

Tables::BoundsWarnings Plan::bounds_warnings() const {
  Tables::BoundsWarnings warnings;
  for (const BoundsError& error : buffers_->bounds_errors) {
    const TableSpec& table = shared_->group.tables[error.table].spec();
    if (table.bounds_check != BoundsCheck::kWarning) continue;
    warnings.emplace_back(table.name, error.count, error.example);
  }
  return warnings;
}

std::vector<std::tuple<std::string, int64_t, int64_t, int64_t, int64_t>> Plan::rejected_timestamps() const {
  std::vector<std::tuple<std::string, int64_t, int64_t, int64_t, int64_t>> found;
  for (size_t t = 0; t < buffers_->lifecycle_logs.size(); ++t) {
    const LifecycleLog& log = buffers_->lifecycle_logs[t];
    if (log.rejected == 0) continue;
    const auto [id, timestamp] = log.example;
    found.emplace_back(shared_->group.tables[t].spec().name, log.rejected, id, timestamp, log.latest);
  }
  return found;
}

void Announcement::forget() noexcept {
  if (ticket_ != 0 && !forgotten_.exchange(true)) shared_->order.forget_later(ticket_);
}

void Engine::check_own(const Plan& plan) const {
  if (plan.shared() != shared_) throw std::invalid_argument("the plan is of another engine");
}

std::unique_ptr<Announcement> Engine::announce(const BatchInput& input) {
  const auto guard = lock();
  uint64_t ticket = 0;
  if (!group_.tables.empty() && group_.tables[0].policy->looks_ahead()) {
    ticket = planner_.announce(input, &group_);
  }
  return std::make_unique<Announcement>(shared_, ticket);
}

std::unique_ptr<Plan> Engine::plan(const BatchInput& input, ExternalArena arena,
                                   const Announcement* announced) {
  if (announced != nullptr && announced->shared() != shared_) {
    throw std::invalid_argument("the announcement is of another engine");
  }
  const auto guard = lock();
  std::shared_ptr<PlanBuffers> buffers = pool_->take();
  auto plan = std::make_unique<Plan>(shared_, buffers, false);
  order_.add(buffers);
  try {
    planner_.plan(input, &group_, buffers, std::move(arena), announced == nullptr ? 0 : announced->ticket());
  } catch (...) {
    order_.take_back();
    throw;
  }
  plan->hold();
  return plan;
}

size_t Engine::arena_bytes(const BatchInput& input) {
  const auto guard = lock();
  return planner_.arena_bytes(input, group_);
}

void Engine::cancel(const Plan& plan) {
  check_own(plan);
  const auto guard = lock();
  if (!order_.is_newest(*plan) || order_.cancel_newest() == nullptr) {
    throw std::runtime_error("only the newest plan can be cancelled, once, and before it is applied");
  }
  Planner::cancel(plan.buffers().get(), &group_);
}

std::vector<std::unique_ptr<Plan>> Engine::unapplied(const Plan* upto) {
  if (upto != nullptr) check_own(*upto);
  std::vector<std::unique_ptr<Plan>> plans;
  const auto guard = lock();
  if (upto != nullptr && upto->buffers()->state == PlanState::kCancelled) {
    throw std::runtime_error("the plan was cancelled");
  }
  if (upto != nullptr && upto->buffers()->state == PlanState::kApplied) return plans;
  order_.for_each([&](const std::shared_ptr<PlanBuffers>& buffers) {
    // Plans are compared by serial number, because `upto` is no longer visited if another thread has applied
    // it meanwhile.
    if (upto != nullptr && buffers->serial > (*upto)->serial) return;
    plans.push_back(std::make_unique<Plan>(shared_, buffers, false));
    plans.back()->keep();
  });
  return plans;
}

void Engine::start_plans(const std::vector<const Plan*>& plans) {
  for (const Plan* plan : plans) plan->shared()->order.check_next(**plan);
  for (const Plan* plan : plans) plan->shared()->order.begin(plan->buffers().get());
}

bool Engine::apply_without_swap(const std::vector<const Plan*>& plans) {
  for (const Plan* plan : plans) {
    if ((*plan)->rows_in > 0 || !plan->shared()->order.is_next_planned(**plan)) return false;
  }
  start_plans(plans);
  for (const Plan* plan : plans) plan->shared()->order.applied(plan->buffers().get());
  return true;
}

void Engine::applied(const Plan& plan) {
  check_own(plan);
  order_.applied(plan.buffers().get());
}

int64_t Engine::in_flight() {
  const auto guard = lock();
  return static_cast<int64_t>(group_.uses.in_flight().size());
}

std::unique_ptr<ReadPlan> Engine::find(const BatchInput& input, int64_t bag_begin, int64_t bag_end) {
  const auto guard = lock();
  if (!order_.empty()) throw std::runtime_error("find needs all plans applied");
  auto plan = std::make_unique<ReadPlan>();
  reader_.find(input, bag_begin, bag_end, &group_, plan.get());
  return plan;
}

std::vector<int64_t> Engine::bag_ranges(const BatchInput& input, int64_t max_lookups) const {
  const int64_t features = static_cast<int64_t>(group_.features.size());
  check_batch(input, features, false);
  return rec_sdk::bag_ranges(input, features, max_lookups);
}

InitialRows Engine::read(const ReadPlan& plan, char* records) {
  const auto guard = lock();
  check_written_back(plan.sources);
  InitialRows initial;
  Reader::read(group_, plan, records, &initial);
  return initial;
}

}  // namespace rec_sdk
