// The columns of rows: their layout in memory, and their values after batches with shows, clicks and
// timestamps.
#include <limits>
#include <map>
#include <memory>

#include "tests/engine/loop.h"

namespace rec_sdk {
namespace {

RowColumnValues numbers(int64_t row) {
  RowColumnValues values;
  values.count = static_cast<uint32_t>(row + 1);
  values.last_use = static_cast<uint32_t>(row + 2);
  values.version = static_cast<uint64_t>(row + 3) << 40;
  values.score = static_cast<double>(row) + 0.25;
  values.clicks = static_cast<uint32_t>(row + 5);
  values.timestamp = -(row + 6) * (int64_t{1} << 40);
  return values;
}

// For every set of columns: columns do not overlap in memory, and columns that are not kept take no memory.
THREADED_TEST(records_of_rows) {
  constexpr int64_t kRows = 9;
  for (int bits = 1; bits < 1 << ColumnSet::kColumns; ++bits) {
    ColumnSet kept;
    int64_t bytes = 0;
    for (int c = 0; c < ColumnSet::kColumns; ++c) {
      if ((bits >> c & 1) == 0) continue;
      kept.add(static_cast<Column>(c));
      bytes += c == 0 || c == 1 || c == 4 ? 4 : 8;
    }
    RowColumns columns(kept);
    columns.extend(kRows);
    CHECK(columns.bytes(kRows) == bytes * kRows && columns.places().bytes() == bytes);
    CHECK(columns.places().undone_bytes() == bytes - (kept.has(Column::kVersion) ? 8 : 0));
    for (int64_t row = 0; row < kRows; ++row) columns.write(row, numbers(row));
    const char* const first = columns.record(0);
    columns.extend(bits % 8 == 7 ? 3000000 : 300000);
    CHECK(columns.record(0) == first && columns.read(299999).count == 0);
    columns.reset(4);
    for (int64_t row = 0; row < kRows; ++row) {
      const RowColumnValues found = columns.read(row), wanted = row == 4 ? RowColumnValues() : numbers(row);
      CHECK(found.count == (kept.has(Column::kCount) ? wanted.count : 0));
      CHECK(found.last_use == (kept.has(Column::kLastUse) ? wanted.last_use : 0));
      CHECK(found.version == (kept.has(Column::kVersion) ? wanted.version : 0));
      CHECK(found.score == (kept.has(Column::kScore) ? wanted.score : 0));
      CHECK(found.clicks == (kept.has(Column::kClicks) ? wanted.clicks : 0));
      CHECK(found.timestamp == (kept.has(Column::kTimestamp) ? wanted.timestamp : 0));
    }
  }
}

// The expected columns of an id, updated lookup by lookup, in a table that admits an id at its second show.
struct Known {
  int64_t shows = 0, clicks = 0, timestamp = 0;
  uint32_t last_use = 0;
  uint64_t version = 0;
  double score = 0;
  bool row = false;
};

struct Given {
  TestBatch batch;
  std::vector<int32_t> shows, clicks;
  std::vector<int64_t> timestamps;
};

Given draw(Loop* loop, bool large, bool shows, int64_t now) {
  Given given;
  const uint64_t spread = large ? 60000 : 90;
  const int32_t least = loop->random() % 2 == 0 ? -1 : 0;  // the least number of clicks; -1 means unknown
  given.batch.batch_size = 2;
  for (int64_t key = 0; key < 3; ++key) {
    given.batch.keys.push_back(2 - key);
    for (int64_t sample = 0; sample < 2; ++sample) {
      const uint64_t count = large ? 40000 : loop->random() % 30;
      for (uint64_t i = 0; i < count; ++i) {
        given.batch.values.push_back(static_cast<int64_t>(loop->random() % spread));
        given.shows.push_back(shows ? static_cast<int32_t>(1 + loop->random() % 3) : 1);
        given.clicks.push_back(static_cast<int32_t>(loop->random() % 4) + least);
        const bool wrong = now > 100 && loop->random() % 50 == 0;  // too late, as if in milliseconds
        given.timestamps.push_back(wrong ? now * 1000000000 : now + static_cast<int64_t>(loop->random() % 9));
      }
      given.batch.offsets.push_back(static_cast<int64_t>(given.batch.values.size()));
    }
  }
  return given;
}

THREADED_TEST(numbers_of_batches) {
  GroupSpec spec = one_table(true, 70000, 0,
                             {Column::kCount, Column::kLastUse, Column::kVersion, Column::kScore,
                              Column::kClicks, Column::kTimestamp});
  spec.tables[0].default_row = true;
  spec.tables[0].rules = Rules({{"showclick", {{"threshold", 2}, {"beta", 0.5}}},
                                {"score", {{"beta", 0.5}, {"decay", 0.75}}},
                                {"share", {{"share", 0.1}}},
                                {"age", {{"seconds", 1000}}}});
  spec.features = {{0, 0, false}, {0, 0, false}, {0, 0, false}};
  Loop loop(spec, 3);
  std::map<int64_t, Known> all;
  uint64_t serial = 0;
  int64_t now = 100, latest = 0;
  for (int i = 0; i < 60; ++i, now += 10) {
    const bool with_shows = loop.random() % 2 == 0, large = i == 3 || i == 10;
    const bool cancel = loop.random() % 4 == 0 || (large && i > 3);
    Given given = draw(&loop, large, with_shows, now);
    BatchInput input = given.batch.input();
    input.shows = with_shows ? given.shows.data() : nullptr;
    input.clicks = given.clicks.data();
    input.timestamps = given.timestamps.data();
    auto plan = loop.engine->plan(input);
    ++serial;
    if (cancel) {
      loop.engine->cancel(*plan);
    } else {
      swap_rows(loop.engine.get(), *plan);
      plan->release();
    }
    std::map<int64_t, Known> next = all;
    for (const int64_t timestamp : given.timestamps) {
      if (!cancel && timestamp < now + 10) latest = std::max(latest, timestamp);
    }
    std::set<int64_t> ids;
    for (int64_t feature = 0; feature < 3;
         ++feature) {  // the features in their order, which is not the order of keys
      const size_t first = static_cast<size_t>(given.batch.offsets[static_cast<size_t>(2 * (2 - feature))]);
      const size_t end = static_cast<size_t>(given.batch.offsets[static_cast<size_t>(2 * (2 - feature) + 2)]);
      for (size_t l = first; l < end; ++l) {
        Known& known = next[given.batch.values[l]];
        known.shows += given.shows[l];
        known.clicks += std::max(0, given.clicks[l]);
        known.timestamp = given.timestamps[l] < now + 10 ? given.timestamps[l] : latest;
        ids.insert(given.batch.values[l]);
      }
    }
    for (const int64_t id : ids) {
      Known& known = next[id];
      known.last_use = static_cast<uint32_t>(loop.engine->lifecycle.clock(0).batches);
      const double score = static_cast<double>(known.shows) + 0.5 * static_cast<double>(known.clicks);
      if (score < 2) continue;
      known.score = known.row ? (known.score + score) * 0.75 : score;
      known.row = true;
      known.version = serial;
      if (cancel && all[id].row)
        all[id].version = serial;  // the version of a row is not restored, so the row is saved once more
    }
    if (!cancel) all = next;
    const auto [known_ids, slots, rows] = loop.engine->tables.rows(0);
    const std::vector<RowColumnValues> values = loop.engine->lifecycle.read_columns(0, rows);
    const auto is_row = [](const auto& one) { return one.second.row; };
    CHECK(std::count_if(all.begin(), all.end(), is_row) == static_cast<int64_t>(rows.size()));
    for (size_t r = 0; r < rows.size(); ++r) {
      const Known& wanted = all[known_ids[r]];
      CHECK(values[r].count == wanted.shows && values[r].clicks == wanted.clicks);
      CHECK(values[r].last_use == wanted.last_use && values[r].timestamp == wanted.timestamp);
      CHECK(values[r].score == wanted.score && values[r].version == wanted.version);
    }
  }
  CHECK(loop.engine->tables.row_count(0) > 50000);
  const std::vector<int64_t> kept = loop.engine->saves.ids_with_records(0);
  for (const uint64_t since : {serial - 9, serial - 1, serial}) {
    std::set<int64_t> wanted;
    for (const auto& [id, known] : all) {
      if (known.row && known.version > since) wanted.insert(id);
    }
    const std::vector<int64_t> found = loop.engine->saves.changed_ids(0, since).first;
    CHECK(std::set<int64_t>(found.begin(), found.end()) == wanted && kept.size() > wanted.size());
  }
}

// Sums that exceed 32 bits saturate, and the sums of other rows in the same batch are exact.
THREADED_TEST(large_sums_stay_at_their_most) {
  constexpr int32_t kLarge = std::numeric_limits<int32_t>::max();
  Loop loop(one_table(true, 8, 0, {Column::kCount, Column::kClicks}), 1);
  const auto train = [&](const std::vector<int64_t>& ids, const std::vector<int32_t>& numbers) {
    TestBatch batch = batch_of(ids);
    BatchInput input = batch.input();
    input.shows = input.clicks = numbers.data();
    const auto plan = loop.engine->plan(input);
    swap_rows(loop.engine.get(), *plan);
    plan->release();
  };
  const auto row = [&](int64_t id) {
    return loop.engine->lifecycle.read_columns(0, loop.engine->tables.find_rows(0, {&id, 1}).first)[0];
  };
  train({7, 8, 7, 7}, {kLarge, 1, kLarge, kLarge});
  CHECK(row(7).count == 4294967295u && row(7).clicks == 4294967295u);
  CHECK(row(8).count == 1 && row(8).clicks == 1);
  train({7, 8, 8}, {-kLarge - 1, 0, 3});  // labels count as at least one show, and as no negative clicks
  CHECK(row(7).count == 4294967295u && row(7).clicks == 4294967295u);
  CHECK(row(8).count == 5 && row(8).clicks == 4);
}

}  // namespace
}  // namespace rec_sdk
