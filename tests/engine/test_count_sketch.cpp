// The count sketch of ids without a row: it never underestimates a count, and a cancelled plan leaves it
// unchanged.
#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <map>
#include <memory>
#include <new>
#include <stdexcept>

#include "tests/engine/loop.h"
#include "torch_npu_ext/engine/base/errors.h"
#include "torch_npu_ext/engine/directory/count_sketch.h"

namespace {

thread_local int64_t allocations_left = std::numeric_limits<int64_t>::max();

}  // namespace

// Not inlined, because GCC would then warn that the freed memory was not allocated by malloc.
__attribute__((noinline)) void* operator new(size_t bytes) {
  void* const memory = --allocations_left < 0 ? nullptr : std::malloc(bytes);
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}
__attribute__((noinline)) void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, size_t) noexcept { operator delete(memory); }

namespace rec_sdk {
namespace {

using State = std::vector<uint8_t>;

TEST(cells_are_as_wide_as_they_need_to_be) {
  const SketchShape one = SketchShape::of(1000, 4, 255), two = SketchShape::of(1000, 4, 256);
  const SketchShape four = SketchShape::of(1000, 3, 65536), least = SketchShape::of(1, 8, 3);
  CHECK(one.cell_bytes == 1 && one.width == 250 && one.full() == 255);
  CHECK(two.cell_bytes == 2 && two.width == 125 && two.full() == 65535);
  CHECK(four.cell_bytes == 4 && four.width == 83 && four.full() == 4294967295u);
  CHECK(least.width == 1 && least.bytes() == 8);
}

TEST(it_never_counts_too_little) {
  for (const uint32_t enough : {200u, 60000u, 70000u}) {
    CountSketch sketch(SketchShape::of(640, 3, enough));
    std::map<int64_t, uint32_t> counts;
    CountSketch::Log log;
    uint64_t random = 1;
    for (int i = 0; i < 2000; ++i) {
      random = random * 6364136223846793005ull + 1442695040888963407ull;
      const int64_t id = static_cast<int64_t>(random >> 40) % 300 - 150;
      const uint32_t shows = 1 + (i % 50 == 0 ? 100 : 0);
      const State before = sketch.state();
      log.clear();
      sketch.add(id, shows, &log);
      sketch.undo(log, shows);
      CHECK(sketch.state() == before);
      log.clear();
      sketch.add(id, shows, &log);
      CHECK(log.cells.size() == 3 && log.before.size() == 3);
      uint32_t& count = counts[id];
      count = std::min(count + shows, sketch.shape().full());
      CHECK(sketch.estimate(id) >= count);
      if (i % 500 == 499) {
        sketch.halve();
        for (auto& each : counts) each.second /= 2;
      }
    }
    for (const auto& [id, count] : counts) CHECK(sketch.estimate(id) >= count);
    // Sketches of several shapes restore the state, also from two sketches that each counted a part of the
    // ids.
    for (const SketchShape shape : {SketchShape{7, 3, 4}, SketchShape{1000, 2, 4}, SketchShape{213, 5, 4}}) {
      CountSketch other(shape);
      other.set_states({CountSketch(SketchShape{5, 1, 1}).state(), sketch.state()});
      for (const auto& [id, count] : counts) CHECK(other.estimate(id) >= count);
    }
  }
}

TEST(full_cells_stay_full) {
  CountSketch narrow(SketchShape{10, 2, 1}), wide(SketchShape{10, 2, 4});
  CountSketch::Log log;
  narrow.add(7, 254, &log);
  CHECK(narrow.estimate(7) == 254);
  narrow.add(7, 4294967295u, &log);
  CHECK(narrow.estimate(7) == 255);
  wide.set_states({narrow.state()});
  CHECK(wide.estimate(7) == 4294967295u);
  narrow.clear();
  CHECK(narrow.estimate(7) == 0 && narrow.counted() == 0);
}

// Undoing a log restores the sketch, also if memory ran out before the log was extended completely.
TEST(a_log_without_room_says_nothing) {
  constexpr int64_t kMany = 10000;
  CountSketch sketch(SketchShape{1000, 4, 1});
  CountSketch::Log log;
  sketch.add(7, 3, &log);
  const State before = sketch.state();
  int64_t allowed = 0;
  for (bool done = false; !done; ++allowed) {
    log = {};
    sketch.add(8, 2, &log);
    allocations_left = allowed;
    try {
      sketch.extend(kMany, &log);
      done = true;
    } catch (const std::bad_alloc&) {
      allocations_left = std::numeric_limits<int64_t>::max();
      sketch.undo(log, 2);
      CHECK(sketch.state() == before);
    }
    allocations_left = std::numeric_limits<int64_t>::max();
  }
  CHECK(allowed == 3);  // the loop also covered a failed allocation of the second array
}

TEST(damaged_states_are_refused) {
  CountSketch sketch(SketchShape{10, 2, 1});
  CountSketch::Log log;
  sketch.add(7, 3, &log);
  const State right = sketch.state();
  for (size_t word = 0; word < 4; ++word) {
    for (const int64_t value : {int64_t{-1}, int64_t{0}, int64_t{3}, int64_t{1} << 62}) {
      if (word == 3 && value >= 0) continue;  // the number of lookups may be any number from 0 on
      State wrong = right;
      std::memcpy(wrong.data() + 8 * word, &value, sizeof(value));
      CHECK_THROWS(sketch.set_states({wrong}), std::invalid_argument);
    }
  }
  CHECK_THROWS(sketch.set_states({right, State(31)}), std::invalid_argument);
  CHECK_THROWS(sketch.set_states({State()}), std::invalid_argument);
  CHECK(sketch.state() == right);
}

// Plans that are cancelled or fail leave the sketch unchanged.
TEST(dropped_plans_leave_no_trace) {
  GroupSpec spec = one_table(true, 8, 0, {Column::kCount});
  spec.tables[0].default_row = true;
  spec.tables[0].rules = Rules({{"sketch", {{"threshold", 4}, {"bytes", 60}}}});
  Loop loop(spec, 3);
  int failed = 0;
  for (int i = 0; i < 300; ++i) {
    const State before = loop.engine->lifecycle.sketch(0);
    const int64_t rows = loop.engine->tables.row_count(0);
    const std::vector<int64_t> ids = loop.random_ids(1 + loop.random() % 20, 60);
    std::unique_ptr<Plan> plan;
    try {
      plan = loop.plan(ids);
    } catch (const CacheTooSmallError&) {
      ++failed;
      CHECK(loop.engine->lifecycle.sketch(0) == before && loop.engine->tables.row_count(0) == rows);
      continue;
    }
    if (i % 2 == 0) {
      std::unique_ptr<Plan> next;
      try {
        next = loop.plan(loop.random_ids(3, 60));
      } catch (const CacheTooSmallError&) {
        ++failed;
      }
      if (next != nullptr) loop.engine->cancel(*next);
      loop.engine->cancel(*plan);
      CHECK(loop.engine->lifecycle.sketch(0) == before && loop.engine->tables.row_count(0) == rows);
      continue;
    }
    swap_rows(loop.engine.get(), *plan);
    plan->release();
  }
  CHECK(failed > 0 && loop.engine->tables.row_count(0) > 8 && loop.engine->lifecycle.candidates(0).empty());
}

int64_t counted(const State& state) {
  int64_t lookups;
  std::memcpy(&lookups, state.data() + 24, sizeof(lookups));
  return lookups;
}

// The end of a step drops pending plans if cells must be halved. Lookups of pending plans do not count for
// this.
TEST(plans_ahead_do_not_fill_it) {
  GroupSpec spec = one_table(true, 8, 0, {Column::kCount});
  spec.tables[0].default_row = true;
  spec.tables[0].rules = Rules({{"sketch", {{"threshold", 4}, {"bytes", 400}, {"halve_after", 5}}}});
  Loop loop(spec, 3);
  std::vector<std::unique_ptr<Plan>> plans;
  for (int64_t first : {0, 10}) plans.push_back(loop.plan({first, first + 1, first + 2}));
  Engine::start_plans({plans[0].get()});
  loop.engine->applied(*plans[0]);
  plans[0]->release();
  CHECK(!loop.engine->lifecycle.evicts({0}));
  CHECK(loop.engine->lifecycle.end_step({0}) == 0 && loop.engine->lifecycle.clock(0).steps == 1);
  Engine::start_plans({plans[1].get()});
  loop.engine->applied(*plans[1]);
  plans[1]->release();
  CHECK(loop.engine->lifecycle.evicts({0}) && counted(loop.engine->lifecycle.sketch(0)) == 6);
  loop.engine->lifecycle.end_step({0});
  CHECK(!loop.engine->lifecycle.evicts({0}) && counted(loop.engine->lifecycle.sketch(0)) == 3);
}

}  // namespace
}  // namespace rec_sdk
