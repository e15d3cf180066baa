// The removal of ids and the reuse of their rows and slots: the pool of numbers, removals between plans that
// succeed, fail or are cancelled, columns and memory, and rows that a load inserts.
#include <algorithm>
#include <memory>
#include <set>
#include <stdexcept>

#include "tests/engine/loop.h"
#include "torch_npu_ext/engine/base/errors.h"
#include "torch_npu_ext/engine/directory/number_pool.h"

namespace rec_sdk {
namespace {

// The pool of numbers, compared with a stack. Undoing calls of take() in reverse order restores the pool.
TEST(pool_of_numbers) {
  std::mt19937_64 random(1);
  NumberPool pool;
  std::vector<uint32_t> free, used;
  uint32_t bound = 0;
  const auto next = [&](size_t k) {
    return k < free.size() ? free[free.size() - 1 - k] : static_cast<uint32_t>(bound + k - free.size());
  };
  for (int i = 0; i < 20000; ++i) {
    CHECK(pool.bound() == bound && pool.count() == static_cast<int64_t>(used.size()));
    const size_t group = random() % 6;
    for (size_t k = 0; k < group; ++k) CHECK(pool.peek(static_cast<int64_t>(k)) == next(k));
    std::vector<uint32_t> taken;
    const int64_t bound_before = pool.bound();
    for (size_t k = 0; k < group; ++k) {
      taken.push_back(pool.take());
      CHECK(taken.back() == next(k));
    }
    if (random() % 3 == 0) {
      while (!taken.empty()) {
        pool.put_back(taken.back(), bound_before);
        taken.pop_back();
      }
      continue;
    }
    for (size_t k = 0; k < group; ++k) free.empty() ? static_cast<void>(++bound) : free.pop_back();
    used.insert(used.end(), taken.begin(), taken.end());
    pool.reserve(pool.bound());
    for (size_t k = random() % 6; k > 0 && !used.empty(); --k) {
      std::swap(used[random() % used.size()], used.back());
      pool.free(used.back());
      free.push_back(used.back());
      used.pop_back();
    }
  }
  CHECK(bound > 20 && !free.empty());
  // Numbers that were taken in between stay taken. All other numbers are returned, each of them once.
  const int64_t before = pool.bound();
  std::vector<uint32_t> undone, kept;
  for (int k = 0; k < 40; ++k) undone.push_back(pool.take());
  for (int k = 0; k < 5; ++k) kept.push_back(pool.take());
  pool.reserve(pool.bound());
  for (size_t k = undone.size(); k-- > 0;) pool.put_back(undone[k], before);
  std::set<uint32_t> again;
  for (int k = 0; k < 40; ++k) again.insert(pool.take());
  CHECK(again == std::set<uint32_t>(undone.begin(), undone.end()));
  for (const uint32_t number : kept) CHECK(again.count(number) == 0);
}

// A failed or cancelled plan leaves rows and their order unchanged, if no id is removed or inserted between
// the plan and its cancellation.
THREADED_TEST(removals_and_plans) {
  Loop loop(one_table(true, 16, 60), 1);
  int cancelled = 0, failed = 0, refused = 0;
  int64_t removed = 0;
  const int rounds = full_tests() ? 6000 : 1800;
  for (int i = 0; i < rounds; ++i) {
    const std::vector<int64_t> ids = loop.random_ids(loop.random() % 22, 75);
    std::unique_ptr<Plan> plan;
    try {
      plan = loop.plan(ids);
    } catch (const CapacityError&) {
      ++failed;
    } catch (const CacheTooSmallError&) {
      ++failed;
    }
    const auto remove_some = [&] {
      const std::vector<int64_t> gone = loop.random_ids(loop.random() % 8, 75);
      try {
        const int64_t known = loop.remove(gone);
        removed += known;
        int64_t expected = 0;
        for (const int64_t id : gone) expected += loop.model.remove(id);
        CHECK(known == expected);
      } catch (const std::runtime_error&) {
        ++refused;
        CHECK(plan != nullptr);
      }
    };
    if (plan != nullptr && loop.random() % 3 == 0) {
      const std::vector<int64_t> others = loop.random_ids(2, 75);
      CHECK_THROWS(loop.remove(others), std::runtime_error);
      CHECK_THROWS(loop.engine->tables.insert(0, others), std::runtime_error);
      if (loop.random() % 2 == 0) loop.engine->cancel(*plan);  // otherwise the plan is dropped
      ++cancelled;
    } else if (plan != nullptr) {
      loop.add(ids);
      loop.run(ids, *plan);
      if (loop.random() % 2 == 0) remove_some();
      plan->release();
    }
    plan.reset();
    if (loop.random() % 2 == 0) remove_some();
    loop.check();
  }
  CHECK(cancelled > rounds / 10 && failed > rounds / 10 && removed > rounds / 3 && refused > rounds / 30);
}

THREADED_TEST(index_tables) {
  Loop loop(one_table(false, 8, 0), 3);
  const std::vector<int64_t> ids = {1, 2, 3, 4, 5, 6, 7, 8}, others = {11, 12, 13};
  auto plan = loop.plan(ids);
  loop.run(ids, *plan);
  CHECK_THROWS(loop.remove({1}), std::runtime_error);
  plan->release();
  plan = loop.plan(others);
  const std::vector<int64_t> left = {1};
  CHECK_THROWS(loop.remove(left), std::runtime_error);  // because cancelling the plan would restore the id
  loop.run(others, *plan);
  plan->release();
  CHECK(loop.engine->saves.ids_with_records(0).size() == 11);
  CHECK_THROWS(loop.remove({5, 40}), std::out_of_range);
  CHECK(loop.remove({1, 5, 5, 30}) == 2);
  loop.model.weights.erase(1);
  loop.model.weights.erase(5);
  CHECK(loop.engine->saves.ids_with_records(0).size() == 9);
  plan = loop.plan({5});
  CHECK((*plan)->rows_out == 0);  // the plan uses a free slot
  loop.run({5}, *plan);
  plan->release();
  plan = loop.plan({1});
  loop.run({1}, *plan);
}

THREADED_TEST(pending_gradients_stay) {
  Loop loop(one_table(true, 2, 0), 4);
  auto plan = loop.plan({1, 2});
  loop.run({1, 2}, *plan);
  loop.engine->mark(*plan);
  plan->release();
  CHECK_THROWS(loop.remove({7, 1}), std::runtime_error);
  plan = loop.plan({3});  // the victim is row 1, which has sums
  loop.run({3}, *plan);
  plan->release();
  CHECK_THROWS(loop.remove({1}), std::runtime_error);
  loop.engine->close_window();
  CHECK(loop.remove({7, 1, 3}) == 2);
}

// The memory statistics are right after insertions and removals, the id map shrinks, and rows and slots are
// reused.
THREADED_TEST(memory_comes_back) {
  GroupSpec spec = one_table(true, 2000, 0);
  Loop loop(spec, 5);
  const int64_t batch = 2000, batches = 100;
  const auto ids_of = [&](int64_t b) {
    std::vector<int64_t> ids(static_cast<size_t>(batch));
    for (int64_t i = 0; i < batch; ++i) ids[static_cast<size_t>(i)] = b * batch + i;
    return ids;
  };
  const Tables::Memory empty = loop.engine->tables.memory();
  const auto train = [&] {
    for (int64_t b = 0; b < batches; ++b) {
      const auto plan = loop.plan(ids_of(b));
      loop.run(ids_of(b), *plan);
    }
  };
  train();
  const Tables::Memory full = loop.engine->tables.memory();
  CHECK(full.index_bytes > 50 * empty.index_bytes);
  CHECK(full.store_bytes >= (batches - 1) * batch * loop.engine->layout().bytes);
  for (int64_t b = 0; b < batches; ++b) CHECK(loop.remove(ids_of(b)) == batch);
  const Tables::Memory after = loop.engine->tables.memory();
  CHECK(after.rows == 0 && after.store_bytes == 0 && after.index_bytes <= 4 * empty.index_bytes);
  loop.model.weights.clear();
  train();
  const auto [ids, slots, rows] = loop.engine->tables.rows(0);
  CHECK(static_cast<int64_t>(rows.size()) == batches * batch && rows.back() + 1 == batches * batch);
  CHECK(loop.engine->tables.memory().store_bytes == full.store_bytes);
}

THREADED_TEST(columns_of_rows) {
  const ColumnSet all = {Column::kCount, Column::kLastUse, Column::kVersion};
  for (const bool hashed : {true, false}) {
    Loop loop(one_table(hashed, 8, 0, all), 6);
    std::map<int64_t, RowColumnValues> expected;
    uint64_t serial = 0;
    for (int i = 0; i < 400; ++i) {
      std::vector<int64_t> ids = loop.random_ids(loop.random() % 12, 20);
      for (int64_t& id : ids) id += 7;
      std::unique_ptr<Plan> plan;
      try {
        plan = loop.plan(ids);
      } catch (const CacheTooSmallError&) {
        continue;
      }
      ++serial;
      const bool cancel = loop.random() % 4 == 0;
      const uint64_t batches = loop.engine->lifecycle.clock(0).batches - 1;
      std::map<int64_t, RowColumnValues> next = expected;
      for (const int64_t id : ids) {
        RowColumnValues& values = next[id];
        values.count += cancel ? 0 : 1;
        values.last_use = cancel ? values.last_use : static_cast<uint32_t>(batches + 1);
        values.version = serial;
      }
      if (cancel) {
        for (const int64_t id : ids) {
          if (hashed && expected.count(id) == 0) next.erase(id);  // the plan inserted the id
        }
        loop.engine->cancel(*plan);
      } else {
        loop.run(ids, *plan);
        plan->release();
      }
      expected = next;
      if (loop.random() % 3 == 0) {
        const int64_t id = static_cast<int64_t>(loop.random() % 20);
        const bool known = loop.remove({id}) == 1;
        CHECK(known || !hashed || expected.count(id) == 0);
        if (known || hashed) expected.erase(id);
        if (known) loop.model.weights.erase(id);
      }
      const auto [known_ids, slots, rows] = loop.engine->tables.rows(0);
      const std::vector<RowColumnValues> values = loop.engine->lifecycle.read_columns(0, rows);
      for (size_t r = 0; r < rows.size(); ++r) {
        const RowColumnValues& wanted = expected[known_ids[r]];
        CHECK(values[r].count == wanted.count && values[r].last_use == wanted.last_use);
        CHECK(values[r].version == wanted.version && values[r].score == 0);
      }
    }
    // A row that is written between batches gets a later version than the latest batch.
    const int64_t row = 0;
    std::vector<char> record(static_cast<size_t>(loop.engine->layout().bytes));
    loop.engine->tables.write_rows(0, {&row, 1}, {&row, 1}, record.data());
    CHECK(loop.engine->lifecycle.read_columns(0, {&row, 1})[0].version == serial + 1);
    const int64_t outside[] = {-1, 1000, INT64_MAX};
    for (const int64_t wrong : outside) {
      CHECK_THROWS(loop.engine->lifecycle.read_columns(0, {&wrong, 1}), std::out_of_range);
      CHECK_THROWS(loop.engine->tables.read_rows(0, {&wrong, 1}, {&wrong, 1}, record.data()),
                   std::out_of_range);
      CHECK_THROWS(loop.engine->tables.write_rows(0, {&wrong, 1}, {&wrong, 1}, record.data()),
                   std::out_of_range);
    }
    loop.engine->tables.clear(0);
    const std::vector<int64_t> again = {3, 3, 4};
    auto plan = loop.plan(again);
    const int64_t three = hashed ? 0 : 3;
    const RowColumnValues values = loop.engine->lifecycle.read_columns(0, {&three, 1})[0];
    CHECK(values.count == 2 && values.version == serial + 1);
  }
  Loop some(one_table(true, 8, 0, {Column::kLastUse}), 7);
  for (const std::vector<int64_t>& ids : {std::vector<int64_t>{5}, {6, 5}}) {
    const auto plan = some.plan(ids);
    some.run(ids, *plan);
  }
  const auto values = some.engine->lifecycle.read_columns(0, std::vector<int64_t>{0, 1});
  CHECK(values[0].last_use == 2 && values[1].last_use == 2 && values[0].count == 0 && values[1].version == 0);
}

THREADED_TEST(numbers_and_records_of_loaded_rows) {
  Engine engine(one_table(true, 24, 0));
  const std::vector<int64_t> ids = {7, -5, 7, 100, INT64_MIN};
  const auto [rows, slots] = engine.tables.insert(0, ids);
  CHECK((rows == std::vector<int64_t>{0, 1, 0, 2, 3}) && slots == std::vector<int32_t>(5, -1));
  const size_t bytes = static_cast<size_t>(engine.layout().bytes);
  std::vector<char> records(5 * bytes), back(4 * bytes);
  for (size_t i = 0; i < records.size(); ++i) records[i] = static_cast<char>(1 + rows[i / bytes]);
  engine.tables.write_rows(0, ids, rows, records.data());
  const std::vector<int64_t> distinct = {7, -5, 100, INT64_MIN}, numbers = {0, 1, 2, 3};
  engine.tables.read_rows(0, distinct, numbers, back.data());
  for (size_t i = 0; i < back.size(); ++i) CHECK(back[i] == static_cast<char>(1 + i / bytes));
}

THREADED_TEST(more_than_the_capacity) {
  Engine engine(one_table(true, 24, 45));
  std::vector<int64_t> ids(46);
  for (int64_t i = 0; i < 46; ++i) ids[i] = i;
  CHECK_THROWS(engine.tables.insert(0, ids), CapacityError);
  CHECK(engine.tables.row_count(0) == 0);
  engine.tables.insert(0, {ids.data(), 45});
  CHECK(engine.tables.row_count(0) == 45);
}

THREADED_TEST(outside_an_index_table) {
  Engine engine(one_table(false, 24, 0));
  const std::vector<char> record(static_cast<size_t>(engine.layout().bytes));
  for (const int64_t outside : {int64_t{40}, int64_t{-1}}) {
    CHECK_THROWS(engine.tables.insert(0, {&outside, 1}), std::out_of_range);
    CHECK_THROWS(engine.tables.write_rows(0, {&outside, 1}, {&outside, 1}, record.data()), std::out_of_range);
  }
}

}  // namespace
}  // namespace rec_sdk
