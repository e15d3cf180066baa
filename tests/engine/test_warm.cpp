// Cache warming: which rows are fetched without a batch, their slots, the order in which they become victims,
// and errors.
#include <numeric>
#include <stdexcept>

#include "tests/engine/loop.h"
#include "torch_npu_ext/engine/policy/cache_policy.h"

namespace rec_sdk {
namespace {

constexpr int64_t kSlots = 8;

std::shared_ptr<Engine> with_rows(const std::string& policy, bool hashed, int64_t rows) {
  GroupSpec spec = one_table(hashed, kSlots, 0);
  spec.policy = policy;
  auto engine = std::make_shared<Engine>(spec);
  std::vector<int64_t> ids(static_cast<size_t>(rows));
  std::iota(ids.begin(), ids.end(), 0);
  const std::vector<int64_t> numbers = engine->tables.insert(0, ids).first;
  const std::vector<char> records(ids.size() * static_cast<size_t>(engine->layout().bytes));
  engine->tables.write_rows(0, ids, numbers, records.data());
  return engine;
}

int64_t warm(Engine* engine, const std::vector<int64_t>& ids, const std::vector<float>& heats) {
  const auto [places, rows, slots] = engine->tables.choose_warm(0, ids);
  std::vector<int64_t> those;
  std::vector<float> of_those;
  for (const int64_t place : places) {
    those.push_back(ids[static_cast<size_t>(place)]);
    of_those.push_back(heats[static_cast<size_t>(place)]);
  }
  engine->tables.warm(0, those, slots, of_those);
  return static_cast<int64_t>(those.size());
}

// Warming fetches seven rows, which leaves one slot free. New rows then take the slots of the coldest rows.
TEST(the_coldest_leave_first) {
  for (const std::string& policy : cache_policy_names()) {
    const auto engine = with_rows(policy, true, 30);
    CHECK(warm(engine.get(), {3, 900, 5, 3, 7, 9, 11, 13, 15}, {9, 9, 8, 9, 7, 6, 5, 4, 3}) == 7);
    CHECK(engine->tables.stats(0).warmed_rows == 7 && engine->tables.stats(0).rows_in == 0);
    const auto plan = plan_of(engine.get(), {20, 21, 22, 23, 3});
    CHECK((*plan)->rows_in == 4 && (*plan)->rows_out == 3);
    const int64_t* const left = (*plan)->swap_out_ids;
    CHECK((std::vector<int64_t>(left, left + 3) == std::vector<int64_t>{15, 13, 11}));
    swap_rows(engine.get(), *plan);
  }
}

TEST(heats_are_those_that_were_given) {
  int counting = 0;
  for (const std::string& policy : cache_policy_names()) {
    const auto engine = with_rows(policy, false, 40);
    CHECK(warm(engine.get(), {1, 2, 3}, {63, 8, 1}) == 3);
    const auto [ids, heats, last_batches] = engine->tables.cached_rows(0);
    CHECK((ids == std::vector<int64_t>{3, 2, 1}));
    const bool counts = heats[0] != 0;
    counting += counts;
    CHECK(!counts || policy != "lru");
    CHECK(heats[0] == (counts ? 1 : 0) && heats[1] == (counts ? 8 : 0));
    CHECK(counts ? std::abs(heats[2] - 63) < 3 : heats[2] == 0);
    CHECK((last_batches == std::vector<uint32_t>{1, 1, 1}));
  }
  CHECK(counting >= 3);  // at least lfu, lrfu and look_ahead
}

TEST(what_is_refused) {
  const auto engine = with_rows("lru", true, 30);
  const auto plan = plan_of(engine.get(), {1, 2});
  CHECK_THROWS(warm(engine.get(), {3}, {1}), std::runtime_error);  // a plan is not applied
  swap_rows(engine.get(), *plan);
  CHECK_THROWS(warm(engine.get(), {3}, {1}), std::runtime_error);  // a batch is in flight
  plan->release();
  CHECK(warm(engine.get(), {1, 3, 2}, {1, 1, 1}) == 1);
  const std::vector<int64_t> ids = {4, 5};
  const std::vector<int32_t> slots = std::get<2>(engine->tables.choose_warm(0, ids));
  const std::vector<float> heats = {1, 1};
  const std::vector<int32_t> turned(slots.rbegin(), slots.rend());
  CHECK_THROWS(engine->tables.warm(0, ids, turned, heats), std::invalid_argument);
  const std::vector<int64_t> unknown = {4, 500}, resident = {4, 3};
  CHECK_THROWS(engine->tables.warm(0, unknown, slots, heats), std::invalid_argument);
  CHECK_THROWS(engine->tables.warm(0, resident, slots, heats), std::invalid_argument);
  CHECK(engine->tables.stats(0).warmed_rows == 1);
  engine->tables.warm(0, ids, slots, heats);
  CHECK(engine->tables.stats(0).warmed_rows == 3);
  const auto index = with_rows("lru", false, 40);
  CHECK_THROWS(warm(index.get(), {40}, {1}), std::out_of_range);
}

// A row with sums outside the cache is not warmed, because it would lose them.
TEST(rows_with_sums_elsewhere_stay) {
  const auto engine = with_rows("lru", true, 30);
  const int64_t row = 4;
  const std::vector<float> sums(2 * kDim);
  engine->saves.put_spilled(0, {&row, 1}, sums.data());
  CHECK(warm(engine.get(), {4, 5}, {1, 1}) == 1);
}

}  // namespace
}  // namespace rec_sdk
