// Snapshots: which rows are pending, and which of them plans are moving.
#include <cstdint>
#include <set>
#include <vector>

#include "tests/engine/check.h"
#include "torch_npu_ext/engine/directory/snapshot.h"

namespace rec_sdk {
namespace {

constexpr int64_t kRows = 200;

// Returns the pending rows that no plan is moving.
std::set<int64_t> still(const Snapshot& snapshot) {
  std::set<int64_t> rows;
  for (int64_t row = 0; row < kRows + 10; ++row) {
    if (snapshot.is_takable(row)) rows.insert(row);
  }
  return rows;
}

std::set<int64_t> all_but(const std::set<int64_t>& others) {
  std::set<int64_t> rows;
  for (int64_t row = 0; row < kRows; ++row) {
    if (others.count(row) == 0) rows.insert(row);
  }
  return rows;
}

TEST(moving_rows_are_marked_once_for_their_plans) {
  Snapshot snapshot(kRows);
  snapshot.add_all();
  int64_t asked = 0;
  const auto move = [&](std::vector<uint64_t> plans, const std::vector<uint32_t>& rows) {
    snapshot.set_moving(std::move(plans), [&](const auto& mark) {
      ++asked;
      for (const uint32_t row : rows) mark(row);
    });
  };
  move({}, {});
  CHECK(still(snapshot) == all_but({}));
  for (int piece = 0; piece < 5; ++piece) move({2}, {3, 64, 199, 205});
  CHECK(still(snapshot) == all_but({3, 64, 199}));
  CHECK(asked == 2 && snapshot.marked() == 3);
  move({2, 4}, {3, 64, 199, 7, 3});  // two plans move row 3
  CHECK(still(snapshot) == all_but({3, 7, 64, 199}));
  move({4}, {7, 3});
  CHECK(still(snapshot) == all_but({3, 7}));
  move({5}, {7});  // this plan is applied, and its write-back is pending
  CHECK(still(snapshot) == all_but({7}));
  move({}, {});
  CHECK(still(snapshot) == all_but({}));
  CHECK(asked == 6 && snapshot.marked() == 3 + 5 + 2 + 1);
}

TEST(what_fails_half_way_is_marked_anew) {
  Snapshot snapshot(kRows);
  snapshot.add_all();
  const auto nothing = [](const auto&) {};
  snapshot.set_moving({}, nothing);
  bool thrown = false;
  try {
    snapshot.set_moving({2}, [](const auto& mark) {
      mark(1);
      throw std::bad_alloc();
    });
  } catch (const std::bad_alloc&) {
    thrown = true;
  }
  snapshot.set_moving({}, nothing);
  CHECK(thrown && still(snapshot) == all_but({}));
}

TEST(rows_are_taken_once) {
  Snapshot snapshot(kRows);
  snapshot.add(3);
  snapshot.add(3);
  snapshot.add(70);
  CHECK(snapshot.pending() == 2);
  snapshot.take(3);
  CHECK(snapshot.pending() == 1 && !snapshot.has(3) && snapshot.has(70) && !snapshot.has(kRows + 1));
}

}  // namespace
}  // namespace rec_sdk
