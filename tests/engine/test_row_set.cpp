// The set of a plan's victims (RowSet), compared with std::set.
#include <random>
#include <set>
#include <utility>
#include <vector>

#include "tests/engine/check.h"
#include "torch_npu_ext/engine/group/row_set.h"

namespace rec_sdk {
namespace {

constexpr uint32_t kMostRow = 0xFFFFFFFD;  // the last row of a table of 2^32 - 2 rows

struct Rows {
  std::vector<int32_t> offsets{0};
  std::vector<uint32_t> rows;

  void add_table(const std::set<uint32_t>& table) {
    rows.insert(rows.end(), table.begin(), table.end());
    offsets.push_back(static_cast<int32_t>(rows.size()));
  }
  std::set<uint32_t> table(size_t t) const {
    return std::set<uint32_t>(rows.begin() + offsets[t], rows.begin() + offsets[t + 1]);
  }
};

void check_set(const RowSet& set, const Rows& rows, std::mt19937* random) {
  for (size_t t = 0; t + 1 < rows.offsets.size(); ++t) {
    const std::set<uint32_t> expected = rows.table(t);
    for (const uint32_t row : expected) {
      CHECK(set.has(static_cast<int32_t>(t), row));
      CHECK(set.has(static_cast<int32_t>(t), row + 1) == (expected.count(row + 1) != 0));
    }
    for (const uint32_t row : {uint32_t{0}, kMostRow, static_cast<uint32_t>((*random)())}) {
      CHECK(set.has(static_cast<int32_t>(t), row) == (expected.count(row) != 0));
    }
  }
}

// The same set is assigned several times, as for consecutive plans.
TEST(random_tables) {
  std::mt19937 random(1);
  RowSet set;
  for (int round = 0; round < 300; ++round) {
    Rows rows;
    const int tables = 1 + static_cast<int>(random() % 4);
    for (int t = 0; t < tables; ++t) {
      // Some tables have no rows. Otherwise rows are multiples of a power of two, sometimes with the first
      // and the last possible row.
      const uint32_t step = uint32_t{1} << random() % 26, count = random() % 8 == 0 ? 0 : random() % 60;
      std::set<uint32_t> table;
      for (uint32_t i = 0; i < count; ++i) table.insert(random() % 64 * step);
      if (random() % 4 == 0) table.insert({0, kMostRow});
      rows.add_table(table);
    }
    set.assign(rows.offsets, rows.rows.data());
    check_set(set, rows, &random);
  }
}

TEST(no_rows) {
  CHECK(!RowSet().has(0, 0));
  CHECK(!RowSet().has(3, kMostRow));
}

}  // namespace
}  // namespace rec_sdk
