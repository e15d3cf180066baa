#include "torch_npu_ext/host/engine.h"

#include <stdexcept>

namespace rec_sdk {

// A plan may be dropped by Python's garbage collector while another thread plans. It must not wait for that,
// so its pins end in the next call that takes the lock.
void SwapPlan::release() noexcept {
  if (!end()) return;
  engine_->defer_release(buffers_);
}

void Engine::defer_release(std::shared_ptr<PlanBuffers> buffers) noexcept {
  const std::lock_guard<std::mutex> guard(release_mutex_);
  to_release_.push_back(std::move(buffers));
}

std::unique_lock<std::mutex> Engine::lock() {
  std::unique_lock<std::mutex> guard(mutex_);
  release_deferred();
  return guard;
}

void Engine::release_deferred() {
  std::vector<std::shared_ptr<PlanBuffers>> released;
  {
    const std::lock_guard<std::mutex> guard(release_mutex_);
    released.swap(to_release_);
  }
  for (const std::shared_ptr<PlanBuffers>& plan : released) {
    group_.uses.release(*plan);
    if (plan->pending_epoch != group_.pending.epoch()) continue;
    for (const uint32_t place : plan->pending_in_sums) group_.pending.free(place);
  }
}

std::unique_ptr<SwapPlan> Engine::plan(const BatchInput& input) {
  const auto guard = lock();
  std::shared_ptr<PlanBuffers> buffers = pool_->take();
  auto plan = std::make_unique<SwapPlan>(shared_from_this(), buffers);
  planner_.plan(input, &group_, buffers.get());
  plan->hold();
  latest_ = buffers.get();
  return plan;
}

void Engine::cancel(SwapPlan* plan) {
  const auto guard = lock();
  const std::shared_ptr<PlanBuffers>& buffers = plan->buffers();
  if (latest_ != buffers.get() || !plan->end()) {
    throw std::runtime_error("only the latest plan can be cancelled, once");
  }
  latest_ = nullptr;
  Planner::cancel(buffers.get(), &group_);
}

std::unique_ptr<ReadPlan> Engine::find(const BatchInput& input, int64_t bag_begin, int64_t bag_end) {
  const auto guard = lock();
  auto plan = std::make_unique<ReadPlan>();
  reader_.find(input, bag_begin, bag_end, &group_, plan.get());
  return plan;
}

void Engine::read(const ReadPlan& plan, char* records, InitialRows* initial) {
  const auto guard = lock();
  Reader::read(group_, plan, records, initial);
}

void Engine::mark_pending(const SwapPlan& plan) {
  const auto guard = lock();
  if (plan.released()) {
    throw std::runtime_error(
        "mark_pending needs a plan that is not released: its rows may have left the cache");
  }
  for (int64_t u = 0; u < plan->uniques; ++u) group_.set_pending(plan->unique_slots[u], true);
}

Engine::Memory Engine::memory() {
  const auto guard = lock();
  Memory memory{};
  for (const Table& table : group_.tables) {
    memory.index_bytes += table.index_bytes();
    memory.store_bytes += table.store.committed_bytes();
    memory.rows += table.rows();
  }
  return memory;
}

void Engine::set_memory_limit(int64_t bytes) {
  const auto guard = lock();
  group_.memory.set_limit(bytes);
}

Stats Engine::stats() {
  const auto guard = lock();
  return group_.stats;
}

void Engine::reset_stats() {
  const auto guard = lock();
  group_.stats = Stats();
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
