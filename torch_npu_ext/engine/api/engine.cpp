#include "torch_npu_ext/engine/api/engine.h"

#include <stdexcept>

namespace rec_sdk {

// A plan may be dropped by Python's garbage collector while another thread plans. It must not wait for that,
// so it ends in the next call that takes the lock.
void Plan::release() noexcept {
  if (released_.exchange(true)) return;
  engine_->end_later(buffers_);
}

void Engine::end_later(std::shared_ptr<PlanBuffers> buffers) noexcept {
  const std::lock_guard<std::mutex> guard(end_mutex_);
  to_end_.push_back(std::move(buffers));
}

void Announcement::forget() noexcept {
  if (ticket_ != 0 && !forgotten_.exchange(true)) engine_->forget_later(ticket_);
}

void Engine::forget_later(uint64_t ticket) noexcept {
  const std::lock_guard<std::mutex> guard(end_mutex_);
  to_forget_.push_back(ticket);
}

std::unique_lock<std::mutex> Engine::lock() {
  std::unique_lock<std::mutex> guard(mutex_);
  end_plans();
  return guard;
}

std::unique_lock<std::mutex> Engine::lock_settled(const char* what) {
  std::unique_lock<std::mutex> guard = lock();
  if (!unapplied_.empty() || !group_.transit.empty()) {
    throw std::runtime_error(std::string(what) + " needs all plans applied and all rows landed: " +
                             std::to_string(unapplied_.size()) + " plans are not applied, rows of " +
                             std::to_string(group_.transit.size()) + " plans have not landed");
  }
  return guard;
}

void Engine::end_plans() noexcept {
  std::vector<std::shared_ptr<PlanBuffers>> ended;
  {
    const std::lock_guard<std::mutex> guard(end_mutex_);
    ended.swap(to_end_);
    for (const uint64_t ticket : to_forget_) group_.future.forget(ticket);
    to_forget_.clear();
  }
  for (const std::shared_ptr<PlanBuffers>& plan : ended) end(plan.get());
  while (!unapplied_.empty()) {
    const PlanBuffers& newest = *unapplied_.back();
    if (!newest.ended || newest.kept > 0 || newest.state != PlanState::kPlanned) break;
    cancel_newest();
  }
}

// A plan that was not applied, and is not the newest, stays until it is applied on the way to a later one.
void Engine::end(PlanBuffers* plan) noexcept {
  plan->ended = true;
  if (plan->state == PlanState::kApplied) group_.uses.release(*plan);
}

void Engine::cancel_newest() noexcept {
  PlanBuffers* const plan = unapplied_.back().get();
  Planner::cancel(plan, &group_);
  plan->state = PlanState::kCancelled;
  unapplied_.pop_back();
}

void Engine::check_own(const Plan& plan) const {
  if (plan.engine() != this) throw std::invalid_argument("the plan is of another engine");
}

std::unique_ptr<Announcement> Engine::announce(const BatchInput& input) {
  const auto guard = lock();
  uint64_t ticket = 0;
  if (!group_.tables.empty() && group_.tables[0].policy->looks_ahead()) {
    ticket = planner_.announce(input, &group_);
  }
  return std::make_unique<Announcement>(shared_from_this(), ticket);
}

std::unique_ptr<Plan> Engine::plan(const BatchInput& input, ExternalArena arena,
                                   const Announcement* announced) {
  if (announced != nullptr && announced->engine() != this) {
    throw std::invalid_argument("the announcement is of another engine");
  }
  const auto guard = lock();
  std::shared_ptr<PlanBuffers> buffers = pool_->take();
  auto plan = std::make_unique<Plan>(shared_from_this(), buffers, false);
  unapplied_.push_back(buffers);
  try {
    planner_.plan(input, &group_, buffers, std::move(arena), announced == nullptr ? 0 : announced->ticket());
  } catch (...) {
    unapplied_.pop_back();
    throw;
  }
  plan->hold();
  return plan;
}

size_t Engine::arena_bytes(const BatchInput& input) {
  const auto guard = lock();
  return planner_.arena_bytes(input, group_);
}

void Engine::cancel(Plan* plan) {
  check_own(*plan);
  const auto guard = lock();
  const PlanBuffers* const buffers = plan->buffers().get();
  if (unapplied_.empty() || unapplied_.back().get() != buffers || buffers->state != PlanState::kPlanned) {
    throw std::runtime_error("only the newest plan can be cancelled, once, and before it is applied");
  }
  cancel_newest();
}

std::vector<std::unique_ptr<Plan>> Engine::unapplied(const Plan* upto) {
  if (upto != nullptr) check_own(*upto);
  std::vector<std::unique_ptr<Plan>> plans;
  const auto guard = lock();
  if (upto != nullptr && upto->buffers()->state == PlanState::kCancelled) {
    throw std::runtime_error("the plan was cancelled");
  }
  if (upto != nullptr && upto->buffers()->state == PlanState::kApplied) return plans;
  for (const std::shared_ptr<PlanBuffers>& buffers : unapplied_) {
    plans.push_back(std::make_unique<Plan>(shared_from_this(), buffers, false));
    plans.back()->keep();
    if (upto != nullptr && buffers == upto->buffers()) break;
  }
  return plans;
}

std::unique_ptr<Plan> Engine::next(const Plan& plan) {
  check_own(plan);
  const auto guard = lock();
  if (unapplied_.empty() || unapplied_.front() != plan.buffers()) return nullptr;
  auto handle = std::make_unique<Plan>(shared_from_this(), plan.buffers(), false);
  handle->keep();
  return handle;
}

void Engine::check_next(const Plan& plan) {
  const auto guard = lock();
  if (plan.buffers()->state == PlanState::kApplied) return;
  if (unapplied_.empty() || unapplied_.front() != plan.buffers()) {
    throw std::runtime_error("plans are applied once each, in their order");
  }
}

void Engine::begin(const std::vector<const Plan*>& plans) {
  for (const Plan* plan : plans) plan->engine()->check_next(*plan);
  for (const Plan* plan : plans) {
    const auto guard = plan->engine()->lock();
    if (plan->buffers()->state == PlanState::kPlanned) plan->buffers()->state = PlanState::kApplying;
  }
}

bool Engine::passes(const Plan& plan) {
  const auto guard = lock();
  const PlanBuffers& buffers = *plan.buffers();
  return buffers.rows_in == 0 && buffers.state == PlanState::kPlanned && !unapplied_.empty() &&
         unapplied_.front().get() == &buffers;
}

bool Engine::pass(const std::vector<const Plan*>& plans) {
  for (const Plan* plan : plans) {
    if (!plan->engine()->passes(*plan)) return false;
  }
  for (const Plan* plan : plans) {
    const auto guard = plan->engine()->lock();
    plan->engine()->finish_oldest();
  }
  return true;
}

void Engine::applied(const Plan& plan) {
  check_own(plan);
  const auto guard = lock();
  PlanBuffers* const buffers = plan.buffers().get();
  if (unapplied_.empty() || unapplied_.front().get() != buffers || buffers->state != PlanState::kApplying) {
    throw std::runtime_error("the plan has not begun to be applied");
  }
  finish_oldest();
}

void Engine::finish_oldest() noexcept {
  PlanBuffers* const plan = unapplied_.front().get();
  plan->state = PlanState::kApplied;
  Planner::finish(*plan, &group_);
  if (plan->ended) group_.uses.release(*plan);
  unapplied_.pop_front();
}

int64_t Engine::in_flight() {
  const auto guard = lock();
  return static_cast<int64_t>(group_.uses.in_flight().size());
}

std::unique_ptr<ReadPlan> Engine::find(const BatchInput& input, int64_t bag_begin, int64_t bag_end) {
  const auto guard = lock();
  if (!unapplied_.empty()) throw std::runtime_error("find needs all plans applied");
  auto plan = std::make_unique<ReadPlan>();
  reader_.find(input, bag_begin, bag_end, &group_, plan.get());
  return plan;
}

void Engine::read(const ReadPlan& plan, char* records, InitialRows* initial) {
  const auto guard = lock();
  check_landed(plan.sources);
  Reader::read(group_, plan, records, initial);
}

std::pair<int32_t, int32_t> Engine::tables(int32_t t) {
  if (t == kAllTables) return {0, table_count()};
  table(t);
  return {t, t + 1};
}

Engine::Memory Engine::memory(int32_t t) {
  const auto guard = lock();
  const auto [first, end] = tables(t);
  Memory memory{};
  for (int32_t k = first; k < end; ++k) {
    const Table& table = group_.tables[k];
    memory.index_bytes += table.index_bytes();
    memory.store_bytes += table.store.committed_bytes();
    memory.disk_bytes += table.store.disk_bytes();
    memory.column_bytes += table.column_bytes();
    memory.rows += table.rows();
    memory.candidates += table.candidates.size();
    memory.candidate_bytes += table.candidates.bytes() + table.sketch.bytes();
  }
  return memory;
}

void Engine::set_memory_limit(int64_t bytes) {
  const auto guard = lock();
  group_.memory.set_limit(bytes);
}

Stats Engine::stats(int32_t t) {
  const auto guard = lock();
  const auto [first, end] = tables(t);
  Stats total = group_.stats[first];
  for (int32_t k = first + 1; k < end; ++k) {
    const Stats& stats = group_.stats[k];
    total.lookups += stats.lookups;
    total.unique_rows += stats.unique_rows;
    total.unique_misses += stats.unique_misses;
    total.new_rows += stats.new_rows;
    total.admitted += stats.admitted;
    total.default_lookups += stats.default_lookups;
    total.evicted += stats.evicted;
    total.rows_in += stats.rows_in;
    total.rows_out += stats.rows_out;
    total.bytes_in += stats.bytes_in;
    total.bytes_out += stats.bytes_out;
    total.bounds_errors += stats.bounds_errors;
    total.warmed_rows += stats.warmed_rows;
    total.largest_batch = std::max(total.largest_batch, stats.largest_batch);
  }
  return total;
}

int64_t Engine::pinned(int32_t t) {
  const auto guard = lock();
  const auto [first, end] = tables(t);
  group_.uses.mark_held();
  int64_t pinned = 0;
  for (int32_t k = first; k < end; ++k) pinned += group_.uses.marked_count(k);
  return pinned;
}

void Engine::reset_stats() {
  const auto guard = lock();
  group_.stats.assign(group_.tables.size(), Stats());
}

std::vector<Engine::BoundsWarning> Engine::bounds_warnings(const Plan& plan) const {
  std::vector<BoundsWarning> warnings;
  for (const BoundsError& error : plan->bounds_errors) {
    const TableSpec& table = group_.tables[error.table].spec();
    if (table.bounds_check == BoundsCheck::kWarning)
      warnings.push_back({table.name, error.count, error.example});
  }
  return warnings;
}

std::vector<Engine::BoundsWarning> Engine::take_bounds_warnings() {
  const auto guard = lock();
  std::vector<BoundsWarning> warnings;
  for (const BoundsError& error : group_.bounds_warnings) {
    warnings.push_back({group_.tables[error.table].spec().name, error.count, error.example});
  }
  group_.bounds_warnings.clear();
  return warnings;
}

}  // namespace rec_sdk
