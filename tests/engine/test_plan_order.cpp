// A plan is applied while another thread plans a later batch, without waiting for that thread.
#include <atomic>
#include <chrono>
#include <memory>
#include <mutex>
#include <thread>

#include "tests/engine/loop.h"
#include "torch_npu_ext/engine/base/parallel.h"

namespace rec_sdk {
namespace {

std::shared_ptr<Engine> new_engine() { return std::make_shared<Engine>(one_table(true, 8, 0)); }

std::vector<char> records_of(const Engine& engine, int64_t rows) {
  return std::vector<char>(static_cast<size_t>(rows * engine.layout().bytes));
}

void apply_plan(Engine* engine, const Plan& plan) {
  Engine::start_plans({&plan});
  engine->applied(plan);
}

// A parallel runner whose first call blocks until `go_on`. That call is made by a thread that is planning,
// under the engine's mutex.
std::atomic<bool> stands_still{false}, go_on{false};

void stand_still(int64_t count, void (*piece)(void* context, int64_t i), void* context) {
  if (!stands_still.exchange(true)) {
    while (!go_on) std::this_thread::yield();
  }
  for (int64_t i = 0; i < count; ++i) piece(context, i);
}

bool wait_for(const std::atomic<bool>& flag) {
  for (int i = 0; i < 60000 && !flag; ++i) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  return flag;
}

TEST(applied_beside_a_plan) {
  const auto engine = new_engine();
  const auto first = plan_of(engine.get(), {1, 2, 3, 4, 5, 6, 7, 8});
  apply_plan(engine.get(), *first);
  first->release();
  const auto second = plan_of(engine.get(), {1, 9, 10});
  CHECK((*second)->rows_out == 2);
  const auto third = plan_of(engine.get(), {1, (*second)->swap_out_ids[0], (*second)->swap_out_ids[1]});
  std::vector<char> in = records_of(*engine, (*third)->rows_in),
                    out = records_of(*engine, (*second)->rows_out);
  const std::vector<int32_t> late = engine->read_ahead(*third, in.data());
  CHECK(late.size() == 2);
  apply_plan(engine.get(), *second);
  engine->complete_write_back(*second, out.data(), nullptr);

  set_parallel_runner(stand_still, [] { return int64_t{2}; }, 0);
  std::unique_ptr<Plan> fourth;
  std::thread planner([&] { fourth = plan_of(engine.get(), {1, 2}); });
  CHECK(wait_for(stands_still));
  std::atomic<bool> done{false};
  std::thread trainer([&] {
    second->release();
    const std::unique_ptr<Plan> next = third->next();
    CHECK(next != nullptr);
    std::vector<char> records = records_of(*engine, static_cast<int64_t>(late.size()));
    engine->read_late(*third, late, records.data());
    apply_plan(engine.get(), *next);
    CHECK_THROWS(engine->applied(*next), std::runtime_error);
    CHECK(third->next() == nullptr);
    third->release();
    done = true;
  });
  CHECK(wait_for(done));
  go_on = true;
  planner.join();
  trainer.join();
  set_parallel_runner(nullptr, nullptr);

  CHECK(engine->in_flight() == 1);  // only the fourth plan
  CHECK(engine->unapplied(nullptr).size() == 1);
  CHECK(engine->tables.stats().largest_batch == 8);
  fourth->release();
  CHECK(engine->unapplied(nullptr).empty());
  CHECK(engine->tables.pinned() == 0);
}

// The pins of a plan end once, when it is both applied and released, in either order.
TEST(ends_before_or_after_it_is_applied) {
  for (const bool released_first : {false, true}) {
    const auto engine = new_engine();
    const auto held = plan_of(engine.get(), {1, 2, 3});
    const auto later = plan_of(engine.get(), {1});
    Engine::start_plans({held.get()});
    if (released_first) held->release();
    CHECK(engine->in_flight() == 2);
    engine->applied(*held);
    CHECK(engine->in_flight() == (released_first ? 1 : 2));
    held->release();
    CHECK(engine->in_flight() == 1);
    CHECK(engine->tables.pinned() == 1);
    apply_plan(engine.get(), *later);
    later->release();
    CHECK(engine->in_flight() == 0);
  }
}

// A plan is not cancelled while another thread, which is about to apply it, has a handle of it.
TEST(a_plan_that_is_kept_does_not_undo_itself) {
  const auto engine = new_engine();
  auto dropped = plan_of(engine.get(), {1, 2, 3});
  auto handles = engine->unapplied(dropped.get());
  dropped.reset();
  CHECK(engine->unapplied(nullptr).size() == 1);
  CHECK(engine->tables.stats().batches == 1);
  handles.clear();
  CHECK(engine->unapplied(nullptr).empty());
  CHECK(engine->tables.stats().batches == 0);
}

// A plan may be applied while another thread requests the unapplied plans up to it. Later plans are not
// returned.
TEST(applied_beside_a_question) {
  const auto engine = new_engine();
  for (int round = 0; round < 500; ++round) {
    const auto asked = plan_of(engine.get(), {1}), later = plan_of(engine.get(), {1});
    Engine::start_plans({asked.get()});
    std::thread trainer([&] { engine->applied(*asked); });
    for (bool applied = false; !applied;) {
      applied = (*asked)->state == PlanState::kApplied;
      for (const auto& found : engine->unapplied(asked.get())) CHECK((*found)->serial == (*asked)->serial);
    }
    trainer.join();
    apply_plan(engine.get(), *later);
  }
}

}  // namespace
}  // namespace rec_sdk
