// The id map compared with std::unordered_map under random operations.
#include <cstdint>
#include <limits>
#include <random>
#include <unordered_map>
#include <utility>
#include <vector>

#include "tests/engine/check.h"
#include "torch_npu_ext/engine/directory/id_map.h"

using rec_sdk::IdMap;
struct Place {
  bool has_slot;
  uint32_t value;  // the slot, or the row of an id without a slot
};
using Model = std::unordered_map<int64_t, Place>;

namespace {

bool equal(const IdMap::Entry& entry, const Place& place) {
  return entry && entry.has_slot() == place.has_slot &&
         entry.slot() == (place.has_slot ? place.value : rec_sdk::kNoSlot) &&
         (place.has_slot || entry.row() == place.value);
}

void check_equal(const IdMap& map, const Model& model) {
  CHECK(map.size() == static_cast<int64_t>(model.size()));
  for (const auto& [id, place] : model) {
    const uint64_t hash = IdMap::hash(id);
    CHECK(equal(map.find(id, hash), place));
    const uint32_t slot = IdMap::slot_at(*map.homes().of(hash), id);
    CHECK(slot == rec_sdk::kNoSlot || (place.has_slot && slot == place.value));
  }
  size_t visited = 0;
  map.for_each([&](int64_t id, const IdMap::Entry& entry) {
    ++visited;
    CHECK(model.count(id) == 1 && equal(entry, model.at(id)));
  });
  CHECK(visited == model.size());
}

void add(IdMap* map, Model* model, int64_t id, uint32_t row) {
  map->reserve(1);
  bool added = false;
  const IdMap::Entry entry = map->find_or_add(id, IdMap::hash(id), row, &added);
  CHECK(added == (model->count(id) == 0));
  if (added) (*model)[id] = {false, row};
  Place& place = model->at(id);
  CHECK(equal(entry, place));
  place = {row % 2 == 0, row / 2};
  place.has_slot ? entry.set_slot(place.value) : entry.set_row(place.value);
}

TEST(extreme_ids) {
  IdMap map;
  Model model;
  uint32_t row = 0;
  const int64_t low = std::numeric_limits<int64_t>::min();
  const int64_t high = std::numeric_limits<int64_t>::max();
  // Some pairs of ids differ in only one 32-bit half.
  for (const int64_t id : {low, low + 1, high, high - 1, int64_t{-1}, int64_t{0}, int64_t{1},
                           int64_t{1} << 32, (int64_t{1} << 32) + 1, int64_t{0xFFFFFFFF}}) {
    CHECK(!map.find(id, IdMap::hash(id)));
    add(&map, &model, id, row++);
  }
  check_equal(map, model);
  CHECK(map.erase(low, IdMap::hash(low)));
  CHECK(!map.erase(low, IdMap::hash(low)));
  model.erase(low);
  check_equal(map, model);
}

void random_operations(uint64_t seed, int64_t range, int operations, int erase_percent) {
  std::mt19937_64 random(seed);
  IdMap map;
  Model model;
  for (int i = 0; i < operations; ++i) {
    const int64_t id = static_cast<int64_t>(random() % static_cast<uint64_t>(range)) - range / 2;
    if (static_cast<int>(random() % 100) < erase_percent) {
      CHECK(map.erase(id, IdMap::hash(id)) == (model.erase(id) == 1));
    } else {
      add(&map, &model, id, static_cast<uint32_t>(i));
    }
    if (i % (operations / 8) == 0) check_equal(map, model);
  }
  check_equal(map, model);
}

// At the maximum load factor there are runs of full buckets. Erasing an id must not interrupt them, also
// where a run wraps around the end of the array.
TEST(erase_at_full_load) {
  std::mt19937_64 random(7);
  for (int round = 0; round < 60; ++round) {
    IdMap map;
    Model model;
    std::vector<int64_t> ids;
    while (map.growth(1) == 0) {
      const int64_t id = static_cast<int64_t>(random());
      add(&map, &model, id, static_cast<uint32_t>(ids.size()));
      ids.push_back(id);
    }
    for (size_t i = 0; i < ids.size(); i += 1 + round % 3) {
      CHECK(map.erase(ids[i], IdMap::hash(ids[i])));
      model.erase(ids[i]);
      check_equal(map, model);
    }
  }
}

// While a map grows, its ids move in parts of random size. Meanwhile ids are inserted and erased in both
// arrays, also in the run of full buckets that wraps around the end of the old array.
void growth_in_pieces(uint64_t seed, int64_t most) {
  std::mt19937_64 random(seed);
  IdMap map;
  Model model;
  std::vector<int64_t> ids;
  int64_t pieces = 0;
  while (map.size() < 30000) {
    const int64_t id = static_cast<int64_t>(random());
    add(&map, &model, id, static_cast<uint32_t>(ids.size()));
    ids.push_back(id);
    if (!map.grows()) continue;
    ++pieces;
    if (random() % 64 == 0) map.reserve(static_cast<int64_t>(random() % static_cast<uint64_t>(most)));
    for (int i = 0; i < 3 && random() % 4 == 0; ++i) {
      const size_t at = random() % ids.size();
      CHECK(map.erase(ids[at], IdMap::hash(ids[at])) == (model.erase(ids[at]) == 1));
    }
    if (random() % 512 == 0) check_equal(map, model);
    CHECK(map.bytes() <= (map.size() + most) * 26);
  }
  CHECK(pieces > 100);
  map.reserve(100000);  // the step is too large for incremental growth, so the map grows at once
  CHECK(!map.grows() && map.growth(100000) == 0);
  check_equal(map, model);
}

// Ids with the last bucket as home also fill the first buckets of the array. They are found while the map
// grows and afterwards. A large map meanwhile frees parts of the old array.
void growth_with_a_run_around_the_end(int64_t least, int64_t piece) {
  IdMap map;
  Model model;
  std::mt19937_64 random(5);
  uint32_t row = 0;
  while (map.size() < least || map.growth(70) > 0 || map.grows()) {
    add(&map, &model, static_cast<int64_t>(random()), row++);
  }
  const int64_t count = static_cast<int64_t>(map.bucket_count());
  for (int found = 0; found < 60;) {
    const int64_t id = static_cast<int64_t>(random());
    if (map.homes().of(IdMap::hash(id)) - map.homes().buckets < count - 1) continue;
    add(&map, &model, id, row++);
    ++found;
  }
  CHECK(!map.grows());
  while (!map.grows()) add(&map, &model, static_cast<int64_t>(random()), row++);
  int64_t pieces = 0;
  for (; map.grows(); ++pieces) {
    check_equal(map, model);
    map.reserve(piece);
  }
  CHECK(pieces >= count / (4 * piece));  // no step moved many more ids than necessary
  check_equal(map, model);
}

// A map that expects ids begins small, and moves each of them about once: it doubles until it holds them.
TEST(growth_to_the_expected_ids) {
  IdMap map(100000);
  CHECK(map.bytes() == IdMap().bytes());
  Model model;
  int64_t grown = 0;
  for (int64_t i = 0; i < 100000; ++i) {
    if (map.growth(1) > 0) ++grown;
    add(&map, &model, i * 1000003, static_cast<uint32_t>(i));
  }
  CHECK(grown <= 11);
  CHECK(map.bytes() <= 100000 * 20);
  check_equal(map, model);
}

TEST(growth) {
  IdMap map;
  Model model;
  int64_t grown = 0;
  for (int64_t i = 0; i < 100000; ++i) {
    if (map.growth(1) > 0) ++grown;
    add(&map, &model, i * 1000003, static_cast<uint32_t>(i));
  }
  CHECK(grown > 10 && grown < 40);  // grows by half each time
  CHECK(map.bytes() <= 100000 * 24);
  check_equal(map, model);
  map.clear();
  check_equal(map, {});
}

// Removing most ids frees memory and keeps the remaining ids. Inserting or removing a few ids does not resize
// the map.
TEST(shrinking) {
  IdMap map;
  Model model;
  for (int64_t i = 0; i < 100000; ++i) add(&map, &model, i * 1000003, static_cast<uint32_t>(i));
  const int64_t full = map.bytes();
  map.shrink();
  CHECK(map.bytes() == full);
  for (int64_t i = 0; i < 99000; ++i) {
    CHECK(map.erase(i * 1000003, IdMap::hash(i * 1000003)));
    model.erase(i * 1000003);
  }
  map.shrink();
  CHECK(map.bytes() < full / 50 && map.growth(200) == 0);
  check_equal(map, model);
  const int64_t small = map.bytes();
  map.shrink();
  CHECK(map.bytes() == small);
}

TEST(operations) {
  random_operations(1, 1000, 40000, 45);
  random_operations(2, 100000, 100000, 20);
  random_operations(3, 64, 20000, 50);
}

TEST(growing_maps) {
  for (uint64_t seed = 10; seed < 16; ++seed) growth_in_pieces(seed, seed % 2 == 0 ? 8 : 2000);
  growth_with_a_run_around_the_end(5000, 64);
  growth_with_a_run_around_the_end(300000, 4000);
}

}  // namespace
