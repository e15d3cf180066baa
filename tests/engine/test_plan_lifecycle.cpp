// The lifecycle of plans, which are made ahead, applied, cancelled, dropped and written back, and the arenas
// that contain them.
#include <cstdlib>

#include "tests/engine/pipeline.h"

namespace rec_sdk {
namespace {

THREADED_TEST(random_lives) {
  Pipeline p(1);
  const bool few = std::getenv("REC_SDK_TEST_ROUNDS") != nullptr;  // fewer rounds under a slow sanitizer
  const int rounds = few ? 500 : full_tests() ? 6000 : 2000;
  for (int i = 0; i < rounds; ++i) {
    switch (p.random() % 13) {
      case 0:
      case 1:
      case 2:
        if (p.planned.size() < 5) p.plan();
        break;
      case 3:
        for (size_t k = p.random() % 3; k > 0; --k) p.cancel_newest();
        break;
      case 4:
        p.drop();
        break;
      case 5:
      case 6:
        p.apply_oldest();
        break;
      case 7:
      case 8:
        p.finish();
        break;
      case 9:
        p.land_some();
        break;
      case 10:
        if (p.random() % 4 == 0) p.take_version();
        break;
      case 11:
        p.read_ahead();
        break;
      default:
        if (p.random() % 8 != 0) break;
        p.settle();
        p.check_tables();
        if (p.random() % 3 == 0) p.close_window();
        if (p.random() % 3 == 0) p.write_some();
        if (p.random() % 2 == 0) p.remove_some();
        p.check_tables();
    }
    p.check();
  }
  p.settle();
  while (!p.held.empty()) p.finish();
  p.check();
  p.check_tables();
  std::printf(
      "applied %ld, cancelled %ld, undone by a drop %ld, dropped before newer ones %ld, too small %ld, "
      "sources %ld, unchanged %ld, not looked at %ld, read ahead %ld, late rows %zu\n",
      p.applied, p.cancelled, p.undone_by_drop, p.dropped_in_the_middle, p.refused, p.waited, p.unchanged,
      p.not_looked_at, p.read_aheads, p.late_rows);
  CHECK(few ||
        (p.applied > 100 && p.cancelled > 30 && p.undone_by_drop > 15 && p.dropped_in_the_middle > 15));
  CHECK(few || (p.refused > 3 && p.waited > 15 && p.unchanged > 30 && p.not_looked_at > 30));
  CHECK(few || (p.read_aheads > 40 && p.late_rows > 5));
  // No slot is lost: a batch can use all of them.
  TestBatch all;
  all.batch_size = 1;
  all.keys = {0, 1};
  for (int32_t t = 0; t < Pipeline::kTables; ++t) {
    for (int64_t i = 0; i < Pipeline::kSlots[t]; ++i) all.values.push_back(i);
    all.offsets.push_back(static_cast<int64_t>(all.values.size()));
  }
  CHECK((*p.engine->plan(all.input()))->uniques == Pipeline::kSlots[0] + Pipeline::kSlots[1]);
}

// A table with one slot, so that the victim of each plan is the row of the previous plan.
class OneSlot {
 public:
  OneSlot() {
    GroupSpec spec = Pipeline::spec();
    spec.tables.pop_back();
    spec.features.erase(spec.features.begin() + 1, spec.features.end());
    spec.tables[0].slots = 1;
    engine = std::make_shared<Engine>(spec);
  }

  std::unique_ptr<Plan> plan(int64_t id) { return plan_of(engine.get(), {id}); }
  void apply(const Plan& plan) {
    engine->read_in(plan, record_);
    Engine::start_plans({&plan});
    engine->applied(plan);
  }
  void land(const Plan& plan, float value) {
    std::memcpy(record_, &value, sizeof value);
    engine->complete_write_back(plan, record_, nullptr);
  }
  float read_in(const Plan& plan) {
    engine->read_in(plan, record_);
    float value;
    std::memcpy(&value, record_, sizeof value);
    return value;
  }

  std::shared_ptr<Engine> engine;

 private:
  char record_[64] = {};
};

using Sources = std::vector<uint64_t>;

// A row is evicted, fetched, and evicted again while the write-backs of other rows are pending.
THREADED_TEST(rows_that_leave_twice) {
  OneSlot one;
  auto first = one.plan(1);
  one.apply(*first);
  first->release();
  auto out = one.plan(2);  // evicts row 1
  one.apply(*out);
  out->release();
  CHECK((*out)->sources.empty() && !out->written_back());
  auto back = one.plan(1);
  CHECK((*back)->sources == Sources{(*out)->serial});
  CHECK_THROWS(one.read_in(*back), std::runtime_error);
  one.land(*out, 5);
  CHECK(one.read_in(*back) == 5);
  one.apply(*back);  // evicts row 2
  back->release();
  auto again = one.plan(3);  // evicts row 1 again
  one.apply(*again);
  again->release();
  auto third = one.plan(1);
  CHECK((*third)->sources == Sources{(*again)->serial});
  one.engine->cancel(*third);
  third = one.plan(2);
  CHECK((*third)->sources == Sources{(*back)->serial});
  one.engine->cancel(*third);
  // The write-backs are completed in reverse order.
  one.land(*again, 7);
  third = one.plan(1);
  CHECK((*third)->sources.empty() && one.read_in(*third) == 7);
  one.land(*back, 6);
  CHECK(one.read_in(*third) == 7);
  one.apply(*third);
}

// After a plan with a write-back of a row is cancelled, the older write-back of the row is the current one
// again.
THREADED_TEST(cancelled_departures) {
  OneSlot one;
  auto first = one.plan(1);
  one.apply(*first);
  first->release();
  auto out = one.plan(2);
  one.apply(*out);
  out->release();
  auto back = one.plan(1);
  one.engine->cancel(*back);
  back = one.plan(1);
  CHECK((*back)->sources == Sources{(*out)->serial});
  one.land(*out, 5);
  CHECK(one.read_in(*back) == 5);
  const uint64_t serial = (*back)->serial;
  one.engine->cancel(*back);
  CHECK(back->written_back());  // no write-back is pending, because the victim stays
  auto next = one.plan(3);
  CHECK((*next)->serial > serial && (*next)->sources.empty());
  CHECK_THROWS(one.land(*next, 1), std::runtime_error);  // the plan is not started
  one.land(*back, 9);                                    // has no effect: the plan has no victims
  CHECK(!next->written_back());
}

// Either the plans of both groups are started or neither of them.
THREADED_TEST(groups_together) {
  OneSlot a, b;
  auto first = a.plan(1), second = b.plan(1);
  auto later = b.plan(1);
  CHECK_THROWS(Engine::start_plans({first.get(), later.get()}), std::runtime_error);
  CHECK_THROWS(a.engine->applied(*first), std::runtime_error);
  a.engine->cancel(*first);  // the plan is not started
  first = a.plan(1);
  Engine::start_plans({first.get(), second.get()});
  CHECK_THROWS(a.engine->cancel(*first), std::runtime_error);
  CHECK_THROWS(b.engine->cancel(*second), std::runtime_error);
  CHECK_THROWS(a.engine->applied(*second), std::invalid_argument);
  CHECK_THROWS(a.engine->cancel(*second), std::invalid_argument);
  CHECK_THROWS(a.read_in(*second), std::invalid_argument);
  // A plan that is dropped after it is started can only be completed.
  first.reset();
  CHECK(a.engine->in_flight() == 1);
  const auto left = a.engine->unapplied(nullptr);
  CHECK(left.size() == 1);
  a.engine->applied(*left[0]);
  b.engine->applied(*second);
  CHECK(a.engine->in_flight() == 0 && b.engine->in_flight() == 2);
}

// A table cannot be cleared while a plan pins its rows. Clearing it also removes the sums of rows outside the
// cache.
THREADED_TEST(tables_in_use_are_not_cleared) {
  OneSlot one;
  const auto away = one.plan(1);
  one.apply(*away);
  one.engine->mark(*away);
  away->release();
  const auto plan = one.plan(2);
  CHECK((*plan)->window_out == 1);
  CHECK_THROWS(one.engine->tables.clear(0), std::runtime_error);
  one.apply(*plan);
  CHECK_THROWS(one.engine->window_rows(), std::runtime_error);  // the write-back of row 1 is pending
  char record[64] = {};
  const std::vector<float> sums(static_cast<size_t>(2 * one.engine->layout().dim));
  one.engine->complete_write_back(*plan, record, sums.data());
  CHECK(one.engine->window_rows().rows.size() == 1);
  CHECK_THROWS(one.engine->tables.clear(0), std::runtime_error);
  plan->release();
  CHECK_THROWS(one.engine->mark(*plan), std::runtime_error);
  one.engine->tables.clear(0);
  const Engine::WindowRows none = one.engine->window_rows();
  CHECK(none.slot_offsets[1] == 0 && none.row_offsets[1] == 0);
}

// ---- Arenas

PlanShape shape_of(const PlanBuffers& p) {
  PlanShape shape;
  shape.lookups = p.lookups;
  shape.bags = p.bags;
  shape.tables = p.tables;
  shape.uniques = p.uniques;
  shape.out = p.rows_out;
  shape.in = p.rows_in;
  shape.pooled = p.offsets != nullptr;
  shape.scaled = p.scale != nullptr;
  shape.weighted = p.positions != nullptr;
  shape.sources = p.grad_source != nullptr;
  return shape;
}

// Checks that each field lies within the part of the arena that is copied to the device, and that no two
// fields overlap.
void check_fields(const PlanBuffers& p) {
  std::vector<std::pair<int64_t, int64_t>> places;
  for (const PlanBuffers::Field& field : p.device_fields()) {
    if (field.begin < 0) continue;
    CHECK(field.begin % 16 == 0);
    places.emplace_back(field.begin, field.begin + field.words);
  }
  std::sort(places.begin(), places.end());
  for (size_t i = 1; i < places.size(); ++i) CHECK(places[i - 1].second <= places[i].first);
  CHECK(places.back().second * 4 <= static_cast<int64_t>(p.device_bytes()));
}

void arenas(bool pooled, bool mean, bool weighted, int features) {
  GroupSpec spec = Pipeline::spec();
  spec.pooled = pooled;
  spec.features = {{0, 0, mean}, {0, 2, false}, {1, 4, false}};
  if (features == 1) {
    spec.tables.pop_back();
    spec.features.erase(spec.features.begin() + 1, spec.features.end());
  }
  const auto engine = std::make_shared<Engine>(spec);
  std::mt19937_64 random(static_cast<uint64_t>(features));
  int owners = 0;
  for (int i = 0; i < 60; ++i) {
    TestBatch batch;
    batch.batch_size = 2;
    batch.weighted = weighted;
    for (int f = 0; f < features; ++f) batch.keys.push_back(f);
    for (int bag = 0; bag < 2 * features; ++bag) {
      for (size_t k = random() % 4; k > 0; --k) batch.values.push_back(static_cast<int64_t>(random() % 25));
      batch.offsets.push_back(static_cast<int64_t>(batch.values.size()));
    }
    const size_t most = engine->arena_bytes(batch.input());
    auto plan = engine->plan(batch.input());
    CHECK(((*plan)->grad_source != nullptr) == (!pooled && features > 1));
    CHECK(((*plan)->scale != nullptr) == (pooled && mean));
    CHECK(((*plan)->positions != nullptr) == (pooled && weighted));
    const size_t exact = PlanBuffers::arena_bytes(shape_of(**plan));
    CHECK(exact <= most);
    check_fields(**plan);
    engine->cancel(*plan);
    plan.reset();
    const auto external = [&](char* data, size_t bytes) {
      ++owners;
      return ExternalArena{data, bytes, std::shared_ptr<void>(data, [&owners](void*) { --owners; })};
    };
    constexpr char kGuard = 0x5A;
    std::vector<uint64_t> memory((exact + 64) / 8 + 1);
    char* const data = reinterpret_cast<char*>(memory.data());
    std::memset(data, kGuard, exact + 64);
    const Stats before = engine->tables.stats();
    CHECK_THROWS(engine->plan(batch.input(), external(data, exact - 1)), std::invalid_argument);
    CHECK(owners == 0 && engine->in_flight() == 0 && engine->tables.stats().batches == before.batches);
    plan = engine->plan(batch.input(), external(data, exact));
    CHECK(owners == 1 && (*plan)->arena() == data && (*plan)->device_bytes() <= exact);
    check_fields(**plan);
    for (size_t k = 0; k < 64; ++k) CHECK(data[exact + k] == kGuard);
    const auto begin = reinterpret_cast<const char*>((*plan)->swap_in_added);
    CHECK(begin + (*plan)->rows_in <= data + exact);
    if (i % 3 == 0) {
      engine->cancel(*plan);
    } else {
      std::vector<char> records(
          static_cast<size_t>(((*plan)->rows_in + (*plan)->rows_out) * engine->layout().bytes));
      engine->read_in(*plan, records.data());
      Engine::start_plans({plan.get()});
      engine->applied(*plan);
      CHECK(owners == 1);
      engine->complete_write_back(*plan, records.data(), nullptr);
    }
    plan.reset();
    CHECK(engine->in_flight() == 0 && owners == 0);
  }
}

THREADED_TEST(arenas_of_plans) {
  arenas(false, false, false, 1);
  arenas(false, false, true, 3);
  for (const bool mean : {false, true}) {
    for (const bool weighted : {false, true}) arenas(true, mean, weighted, 3);
  }
}

}  // namespace
}  // namespace rec_sdk
