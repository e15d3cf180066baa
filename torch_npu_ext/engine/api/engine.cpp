#include "torch_npu_ext/engine/api/engine.h"

#include <stdexcept>

namespace rec_sdk {

// A plan may be dropped by Python's garbage collector while another thread plans. It must not wait for that,
// so it ends in the next call that takes the lock.
void Plan::release() noexcept {
  if (!released_.exchange(true)) engine_->order_.end_later(buffers_);
}

void Announcement::forget() noexcept {
  if (ticket_ != 0 && !forgotten_.exchange(true)) engine_->order_.forget_later(ticket_);
}

std::unique_lock<std::mutex> Engine::lock() {
  std::unique_lock<std::mutex> guard(mutex_);
  catch_up();
  return guard;
}

std::unique_lock<std::mutex> Engine::lock_settled(const char* what) {
  std::unique_lock<std::mutex> guard = lock();
  if (!order_.empty() || !group_.transit.empty()) {
    throw std::runtime_error(std::string(what) + " needs all plans applied and all rows landed: " +
                             std::to_string(order_.size()) + " plans are not applied, rows of " +
                             std::to_string(group_.transit.size()) + " plans have not landed");
  }
  return guard;
}

// The group learns what threads did to plans since the last call.
void Engine::catch_up() noexcept {
  for (const uint64_t ticket : order_.take_forgotten()) group_.future.forget(ticket);
  while (const std::shared_ptr<PlanBuffers> plan = order_.take_applied()) finish(plan.get());
  for (const std::shared_ptr<PlanBuffers>& plan : order_.take_ended()) end(plan.get());
  while (const std::shared_ptr<PlanBuffers> plan = order_.cancel_released())
    Planner::cancel(plan.get(), &group_);
}

void Engine::finish(PlanBuffers* plan) noexcept {
  Planner::finish(*plan, &group_);
  plan->finished = true;
  if (plan->ended) group_.uses.release(*plan);
}

// A plan that was not applied, and is not the newest, stays until it is applied on the way to a later one.
void Engine::end(PlanBuffers* plan) noexcept {
  plan->ended = true;
  if (plan->finished) group_.uses.release(*plan);
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

void Engine::cancel(Plan* plan) {
  check_own(*plan);
  const auto guard = lock();
  if (!order_.is_newest(*plan->buffers()) || order_.cancel_newest() == nullptr) {
    throw std::runtime_error("only the newest plan can be cancelled, once, and before it is applied");
  }
  Planner::cancel(plan->buffers().get(), &group_);
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
    // By numbers: `upto` itself may be applied by now, and is not there any more.
    if (upto != nullptr && buffers->serial > (*upto)->serial) return;
    plans.push_back(std::make_unique<Plan>(shared_from_this(), buffers, false));
    plans.back()->keep();
  });
  return plans;
}

std::unique_ptr<Plan> Engine::next(const Plan& plan) {
  check_own(plan);
  auto handle = std::make_unique<Plan>(shared_from_this(), plan.buffers(), false);
  if (!order_.keep_next(*plan, [&handle] { handle->keep(); })) return nullptr;
  return handle;
}

void Engine::begin(const std::vector<const Plan*>& plans) {
  for (const Plan* plan : plans) plan->engine()->order_.check_next(**plan);
  for (const Plan* plan : plans) plan->engine()->order_.begin(plan->buffers().get());
}

bool Engine::pass(const std::vector<const Plan*>& plans) {
  for (const Plan* plan : plans) {
    if ((*plan)->rows_in > 0 || !plan->engine()->order_.is_next_planned(**plan)) return false;
  }
  begin(plans);
  for (const Plan* plan : plans) plan->engine()->applied(*plan);
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
    memory.candidates += table.admission->candidates.size();
    memory.candidate_bytes += table.admission->bytes();
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
