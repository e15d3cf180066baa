// The change log, compared with the versions of all rows.
#include <algorithm>
#include <random>
#include <set>
#include <utility>
#include <vector>

#include "tests/engine/check.h"
#include "torch_npu_ext/engine/directory/change_log.h"

namespace rec_sdk {
namespace {

struct Tally {
  int64_t known = 0, unknown = 0, left_out = 0;
};

// Random batches, writes, new epochs and forgotten changes. For a large table, the log has space for few of
// its rows.
void random_changes(uint64_t seed, int64_t rows, int64_t most_per_batch, Tally* tally) {
  std::mt19937_64 random(seed);
  ChangeLog log;
  std::vector<uint64_t> versions(static_cast<size_t>(rows));
  std::vector<uint64_t> asked = {0};
  uint64_t serial = 0;
  const auto change = [&](int64_t id, uint64_t version) {
    log.add(id, static_cast<uint32_t>(2 * id), versions[static_cast<size_t>(id)]);
    versions[static_cast<size_t>(id)] = version;
  };
  for (int step = 0; step < 200; ++step) {
    const int64_t count = static_cast<int64_t>(random() % static_cast<uint64_t>(most_per_batch));
    switch (random() % 8) {
      case 0:  // a version is requested while a batch may be in flight
        log.begin_epoch(serial + 1);
        asked.push_back(serial - (serial > 0 ? random() % 2 : 0));
        break;
      case 1:  // a version is requested while no batch is in flight
        log.begin_epoch(++serial);
        asked.push_back(serial);
        break;
      case 2:
        log.forget(asked[random() % asked.size()]);
        break;
      case 3:  // rows are written between batches
        log.reserve(count, rows, serial + 1);
        for (int64_t i = 0; i < count; ++i) change(static_cast<int64_t>(random() % rows), serial + 1);
        break;
      case 4:
        if (random() % 8 == 0) {
          const size_t id = random() % static_cast<uint64_t>(rows);
          log.add_unknown(versions[id], serial + 1);
          versions[id] = serial + 1;
        }
        break;
      default:
        log.reserve(count, rows, serial + 1);
        ++serial;
        for (int64_t i = 0; i < count; ++i) change(static_cast<int64_t>(random() % rows), serial);
    }
    for (const uint64_t since : asked) {
      if (!log.knows(since)) {
        ++tally->unknown;
        continue;
      }
      ++tally->known;
      const std::vector<int64_t> listed = log.ids_after(since);
      const std::set<int64_t> found(listed.begin(), listed.end());
      const ChangeLog::Entries entries = log.entries_after(since);
      for (int64_t i = 0; i < entries.count; ++i) CHECK(entries.rows[i] == 2 * entries.ids[i]);
      CHECK(found.size() == listed.size() && std::is_sorted(listed.begin(), listed.end()));
      for (int64_t id = 0; id < rows; ++id) {
        CHECK(versions[static_cast<size_t>(id)] <= since || found.count(id) == 1);
      }
      tally->left_out += rows - static_cast<int64_t>(found.size());
    }
  }
}

// The radix sort is stable, for keys of different widths, some of which are equal.
TEST(sorts) {
  std::mt19937_64 random(1);
  using Item = std::pair<uint64_t, size_t>;
  for (const size_t count : {0, 1, 511, 512, 3000}) {
    for (const int bits : {1, 8, 20, 33, 64}) {
      for (const uint64_t same : {uint64_t{0}, uint64_t{5} << 40}) {
        std::vector<Item> items;
        for (size_t i = 0; i < count; ++i) items.emplace_back(random() >> (64 - bits) | same, i);
        std::vector<Item> expected = items;
        std::sort(expected.begin(), expected.end());  // equal keys are ordered by position
        radix_sort(&items, [](const Item& item) { return item.first; });
        CHECK(items == expected);
      }
    }
  }
}

TEST(changes) {
  Tally few, many;
  for (uint64_t seed = 0; seed < 40; ++seed) random_changes(seed, 50, 20, &few);
  for (uint64_t seed = 0; seed < 4; ++seed) random_changes(seed, 2 * ChangeLog::kLeast, 900, &many);
  CHECK(few.known > 1000 && few.left_out > few.known);
  CHECK(many.known > 100 && many.unknown > 100);
}

}  // namespace
}  // namespace rec_sdk
