// Admission and eviction of ids: counts stay exact when plans are cancelled, and rows in use are not evicted.
#include <map>
#include <memory>
#include <stdexcept>

#include "tests/engine/loop.h"
#include "torch_npu_ext/engine/base/errors.h"

namespace rec_sdk {
namespace {

std::vector<int64_t> candidate_ids(Engine* engine) {
  std::vector<int64_t> ids;
  for (const Lifecycle::Candidate& candidate : engine->lifecycle.candidates(0)) ids.push_back(candidate.id);
  return ids;
}

using Given = std::vector<std::pair<std::string, RuleNumbers::Values>>;

GroupSpec admitting(int64_t threshold, ColumnSet columns = {Column::kCount}, Given others = {}) {
  GroupSpec spec = one_table(true, 4, 0, columns);
  spec.tables[0].default_row = true;
  others.push_back({"count", {{"threshold", threshold}}});
  spec.tables[0].rules = Rules(others);
  return spec;
}

// All lookups of an id in a batch get the same result. It is the id's row if the batch's lookups bring its
// count to the threshold.
THREADED_TEST(ids_are_admitted) {
  Loop loop(admitting(3), 1);
  auto plan = loop.plan({8, 9, 8, 8, 5});
  const std::vector<int32_t> slots((*plan)->slots, (*plan)->slots + 5);
  CHECK((slots == std::vector<int32_t>{0, 4, 0, 0, 4}));
  CHECK((*plan)->uniques == 1 && (*plan)->segment_offsets[1] == 3);
  const std::vector<int32_t> grad_row((*plan)->grad_row, (*plan)->grad_row + 5);
  CHECK((grad_row == std::vector<int32_t>{0, 2, 3, 1, 4}));
  CHECK(loop.engine->tables.row_count(0) == 1 && loop.engine->tables.stats().default_lookups == 2);
  // A cancelled plan leaves no counts, and planning the batch again gives the same plan.
  loop.engine->cancel(*plan);
  plan.reset();
  CHECK(loop.engine->tables.row_count(0) == 0 && candidate_ids(loop.engine.get()).empty());
  CHECK(loop.engine->tables.stats().default_lookups == 0 && loop.engine->lifecycle.clock(0).batches == 0);
  loop.add({8});
  plan = loop.plan({8, 9, 8, 8, 5});
  CHECK((*plan)->uniques == 1);
  CHECK_THROWS(loop.engine->lifecycle.candidates(0), std::runtime_error);  // a plan is pending
  swap_rows(loop.engine.get(), *plan);
  CHECK((candidate_ids(loop.engine.get()) == std::vector<int64_t>{5, 9}));
  plan->release();
  // All lookups of this batch read the default row, so the plan has no rows and no segments.
  const auto none = loop.plan({20, 21, 22, 23, 24});
  CHECK((*none)->uniques == 0 && (*none)->segment_offsets[0] == 0 && (*none)->rows_in == 0);
  CHECK((*none)->slots[0] == 4 && (*none)->slots[4] == 4);
}

// Counts of ids after random batches, some of which fail or are cancelled, compared with a simple model.
THREADED_TEST(counts_are_exact) {
  GroupSpec spec = admitting(4, {Column::kCount, Column::kLastUse});
  spec.tables[0].slots = 16;
  Loop loop(spec, 1);
  std::map<int64_t, int64_t> counts;
  int failed = 0, cancelled = 0;
  const int rounds = full_tests() ? 3000 : 1200;
  for (int i = 0; i < rounds; ++i) {
    const std::vector<int64_t> ids = loop.random_ids(loop.random() % 40, 40 + static_cast<uint64_t>(i) / 4);
    std::unique_ptr<Plan> plan;
    try {
      plan = loop.plan(ids);
    } catch (const CacheTooSmallError&) {
      ++failed;
      continue;
    }
    if (loop.random() % 3 == 0) {
      if ((*plan)->uniques < 16) loop.engine->cancel(*loop.plan(loop.random_ids(1, 99)));
      loop.engine->cancel(*plan);
      ++cancelled;
      continue;
    }
    for (const int64_t id : ids) ++counts[id];
    swap_rows(loop.engine.get(), *plan);
    plan->release();
    std::map<int64_t, int64_t> found;
    for (const Lifecycle::Candidate& candidate : loop.engine->lifecycle.candidates(0)) {
      CHECK(candidate.values.count < 4);
      found[candidate.id] = candidate.values.count;
    }
    const auto [known, slots, rows] = loop.engine->tables.rows(0);
    const std::vector<RowColumnValues> values = loop.engine->lifecycle.read_columns(0, rows);
    for (size_t r = 0; r < rows.size(); ++r) {
      CHECK(values[r].count >= 4);
      found[known[r]] = values[r].count;
    }
    CHECK(found == counts);
    if (i % 50 == 0 && !known.empty()) {  // the count of a removed id starts again
      CHECK(loop.remove({known[0]}) == 1);
      counts.erase(known[0]);
    }
  }
  CHECK(failed > rounds / 150 && cancelled > rounds / 15);
}

THREADED_TEST(rows_in_use_are_not_evicted) {
  GroupSpec spec = one_table(true, 8, 0, {Column::kCount, Column::kLastUse});
  spec.tables[0].rules = Rules({{"idle", {{"batches", 2}}}});
  Loop loop(spec, 1);
  const auto train = [&](const std::vector<int64_t>& ids) {
    auto plan = loop.plan(ids);
    loop.run(ids, *plan);
    return plan;
  };
  const auto held = train({1});
  train({2});
  train({3});
  CHECK(!loop.engine->lifecycle.evicts({5}) && loop.engine->lifecycle.evicts({1}));
  CHECK(loop.engine->lifecycle.end_step({1}) == 0);  // the idle id 1 stays: its update is pending
  CHECK(loop.engine->lifecycle.evictable_ids(0, true).ids.empty());
  held->release();
  const EvictableIds leaving = loop.engine->lifecycle.evictable_ids(0, std::vector<int64_t>{2});
  CHECK(leaving.ids == std::vector<int64_t>{1});
  CHECK(leaving.reasons == std::vector<uint8_t>{static_cast<uint8_t>(EvictReason::kIdle)});
  loop.model.weights.erase(1);
  CHECK(loop.engine->lifecycle.end_step({2}) == 1 && loop.engine->tables.row_count(0) == 2);
  const auto window = train({2});
  loop.engine->mark(*window);
  window->release();
  train({4});
  train({5});
  CHECK(loop.engine->lifecycle.evict(0) == 1);  // id 3; id 2 stays, because its gradient is pending
  loop.engine->close_window();
  CHECK(loop.engine->lifecycle.evict(0) == 1 && loop.engine->tables.stats().evicted == 3);
  CHECK(loop.engine->lifecycle.clock(0).steps == 2);
  CHECK_THROWS(loop.engine->lifecycle.end_step({1, 1}), std::invalid_argument);
}

THREADED_TEST(bounded_tables) {
  GroupSpec spec = admitting(2, {Column::kCount, Column::kLastUse}, {{"rows", {{"most", 16}}}});
  spec.tables[0].slots = 64;
  Loop loop(spec, 2);
  for (int64_t i = 0; i < 400; ++i) {
    std::vector<int64_t> ids = {1, 3 * i, 3 * i, 3 * i + 1};
    auto plan = loop.plan(ids);
    auto ahead = loop.plan({-i - 1, -i - 1});
    const bool evicts = loop.engine->tables.row_count(0) - 1 > 16;  // ids of pending plans do not count
    loop.engine->cancel(*ahead);
    swap_rows(loop.engine.get(), *plan);
    plan->release();
    CHECK(!evicts || loop.engine->lifecycle.evicts({0}));
    loop.engine->lifecycle.end_step({0});
    CHECK(loop.engine->tables.row_count(0) <= 16 && loop.engine->lifecycle.candidates(0).size() <= 16);
  }
  CHECK(loop.engine->tables.memory().candidate_bytes < 4096);
  const int64_t one = 1;
  CHECK(loop.engine->tables.find_rows(0, {&one, 1}).first[0] >= 0);  // the most frequent id stays
}

// The map of candidates compared with std::map, with many candidates in the same bucket.
THREADED_TEST(map_of_candidates) {
  for (const bool wide : {false, true}) {
    std::mt19937_64 random(3);
    Candidates candidates(wide);
    std::map<int64_t, uint32_t> expected;
    for (int i = 0; i < (full_tests() ? 40000 : 10000); ++i) {
      const int64_t id = static_cast<int64_t>(random() % 600) * (INT64_MAX / 600) + INT64_MIN / 2;
      if (random() % 3 != 0) {
        candidates.reserve(1);
        const int64_t place = candidates.find_or_add(id);
        Candidates::Values values = candidates.get(place);
        CHECK(values.count == expected[id] && values.clicks == (wide ? expected[id] : 0));
        ++values.count;
        ++values.clicks;
        candidates.set(place, values);
        ++expected[id];
      } else {
        CHECK(candidates.erase(id) == (expected.erase(id) == 1));
      }
      if (i % 1000 == 0) candidates.shrink();
      CHECK(candidates.size() == static_cast<int64_t>(expected.size()));
      CHECK((candidates.find(id) >= 0) == (expected.count(id) == 1));
    }
    std::map<int64_t, uint32_t> found;
    candidates.for_each([&](int64_t id, const Candidates::Values& values) { found[id] = values.count; });
    CHECK(found == expected && found.size() > 100);
  }
}

THREADED_TEST(wrong_tables) {
  GroupSpec spec = admitting(2);
  spec.tables[0].default_row = false;
  CHECK_THROWS(Engine(spec), std::invalid_argument);
  const Rules idle({{"idle", {{"batches", 2}}}});
  spec = one_table(false, 4, 0, {Column::kLastUse});
  spec.tables[0].rules = idle;
  CHECK_THROWS(Engine(spec), std::invalid_argument);  // an index table cannot admit ids
  spec = one_table(true, 4, 0);
  spec.tables[0].rules = idle;
  CHECK_THROWS(Engine(spec), std::invalid_argument);  // the column of the last use is missing
  spec = one_table(true, 4, 0, {Column::kCount, Column::kScore});
  CHECK_THROWS(Engine(spec), std::invalid_argument);  // no rule computes scores
  spec = one_table(false, 4, 0);
  spec.tables[0].default_row = true;
  spec.tables[0].slots = int64_t{1} << 30;
  CHECK_THROWS(Engine(spec), std::invalid_argument);  // the table has one slot too many
  spec.tables[0].slots = INT64_MAX;
  CHECK_THROWS(Engine(spec), std::invalid_argument);
  spec = one_table(true, 4, 0, {Column::kTimestamp});
  spec.tables[0].rules = Rules({{"age", {{"seconds", 2}}}});
  Loop old(spec, 1);
  CHECK_THROWS(old.plan({1}), std::invalid_argument);  // the batch has no timestamps
  spec = admitting(2);
  spec.tables[0].rules = Rules({{"showclick", {{"threshold", 2}, {"beta", 1}}}});
  Loop clicked(spec, 1);
  CHECK_THROWS(clicked.plan({1}), std::invalid_argument);  // the batch has no clicks
}

}  // namespace
}  // namespace rec_sdk
