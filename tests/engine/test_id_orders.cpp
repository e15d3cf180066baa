// In any order and with any pattern, ids cost about as much as random ids, measured by the number of buckets
// that lookups read. The most important order is the one in which another map lists its ids, because saves
// have that order.
#include <cstdint>
#include <functional>
#include <random>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "tests/engine/check.h"
#include "torch_npu_ext/engine/directory/candidates.h"
#include "torch_npu_ext/engine/directory/id_map.h"
#include "torch_npu_ext/engine/plan/unique.h"

using rec_sdk::Candidates;
using rec_sdk::IdMap;
using Ids = std::vector<int64_t>;

namespace {

constexpr int64_t kIds = 40000;

Ids random_ids(int64_t count, uint64_t seed) {
  std::mt19937_64 random(seed);
  Ids ids;
  for (int64_t i = 0; i < count; ++i) ids.push_back(static_cast<int64_t>(random()));
  return ids;
}

// Returns the number of buckets that a lookup of a known id reads.
int64_t probes(const IdMap& map, int64_t id) {
  const IdMap::Homes homes = map.homes();
  const IdMap::Bucket* bucket = homes.of(IdMap::hash(id));
  const bool old = bucket < homes.buckets ||
                   bucket >= homes.buckets + homes.count;  // whether it is in the old array of a growing map
  const IdMap::Bucket* const begin = old ? homes.old_buckets : homes.buckets;
  const IdMap::Bucket* const end = begin + (old ? homes.old_count : homes.count);
  for (int64_t looked_at = 1;; ++looked_at) {
    for (int lane = 0; lane < IdMap::kLanes; ++lane) {
      if ((bucket->used >> lane & 1) != 0 && bucket->id[lane] == id) return looked_at;
    }
    bucket = bucket + 1 == end ? begin : bucket + 1;
  }
}

int64_t probes(const Candidates& map, int64_t id) {
  const int64_t places = map.places(), place = map.find(id), home = static_cast<int64_t>(map.home(id));
  return 1 + (place >= home ? place - home : place + places - home);
}

void add(IdMap* map, int64_t id) {
  map->reserve(1);
  bool added = false;
  map->find_or_add(id, IdMap::hash(id), static_cast<uint32_t>(map->size()), &added);
}

void add(Candidates* map, int64_t id) {
  map->reserve(1);
  map->set(map->find_or_add(id), {1, 0, 0, 0});
}

Ids listed(const IdMap& map) {
  Ids ids;
  map.for_each([&](int64_t id, const IdMap::Entry&) { ids.push_back(id); });
  return ids;
}

Ids listed(const Candidates& map) {
  Ids ids;
  map.for_each([&](int64_t id, const Candidates::Values&) { ids.push_back(id); });
  return ids;
}

// Returns how many seconds it takes to insert the ids into a growing map and then to find all of them.
template <class Map>
int64_t total_probes(Map* map, const Ids& ids) {
  int64_t total = 0;
  for (const int64_t id : ids) {
    add(map, id);
    total += probes(*map, id);
  }
  for (const int64_t id : ids) total += probes(*map, id);
  return total;
}

template <class Map>
Map filled(Map map, const Ids& ids) {
  for (const int64_t id : ids) add(&map, id);
  return map;
}

std::vector<std::pair<std::string, Ids>> patterns() {
  std::vector<std::pair<std::string, Ids>> found;
  const auto add_pattern = [&found](const std::string& name, const std::function<uint64_t(uint64_t)>& id) {
    std::set<int64_t> seen;
    Ids ids;
    for (uint64_t i = 0; static_cast<int64_t>(ids.size()) < kIds; ++i) {
      const int64_t next = static_cast<int64_t>(id(i));
      if (seen.insert(next).second) ids.push_back(next);
    }
    found.emplace_back(name, ids);
  };
  for (int k = 0; k <= 48; k += 4) {
    add_pattern("multiples of 2^" + std::to_string(k), [k](uint64_t i) { return i << k; });
    add_pattern("negative ones", [k](uint64_t i) { return 0 - (i << k); });
  }
  for (int k = 8; k <= 40; k += 8) {
    add_pattern("equal low bits", [k](uint64_t i) { return i << k | 0x5A; });
    add_pattern("equal high bits", [k](uint64_t i) { return uint64_t{0xA5} << 56 | i << (k % 32); });
    add_pattern("equal low and high bits", [k](uint64_t i) { return uint64_t{1} << 63 | i << (k % 40) | 1; });
  }
  add_pattern("both halves", [](uint64_t i) { return i << 32 | i; });
  add_pattern("one after the other in both halves", [](uint64_t i) { return (i % 200) << 32 | i / 200; });
  add_pattern("multiples of the hash's constants", [](uint64_t i) { return i * 0x9E3779B97F4A7C15ull; });
  add_pattern("multiples of its other constant", [](uint64_t i) { return i * 0xD6E8FEB86659FD93ull; });
  add_pattern("bytes in reverse", [](uint64_t i) { return __builtin_bswap64(i); });
  return found;
}

// Returns ids in the orders in which maps of this program list them.
std::vector<std::pair<std::string, Ids>> own_orders() {
  const Ids ids = random_ids(kIds, 1);
  std::vector<std::pair<std::string, Ids>> found;
  const IdMap map = filled(IdMap(), ids);
  found.emplace_back("of a map", listed(map));
  found.emplace_back("of a map that was filled in that order", listed(filled(IdMap(), listed(map))));
  found.emplace_back("of a map that doubles", listed(filled(IdMap(kIds), ids)));
  found.emplace_back("of candidates", listed(filled(Candidates(false), ids)));
  const Ids again = listed(filled(Candidates(true), listed(filled(Candidates(false), ids))));
  found.emplace_back("of candidates that came in that order", again);
  Ids two = listed(filled(IdMap(), random_ids(kIds / 2, 2)));
  const Ids second = listed(filled(IdMap(), random_ids(kIds / 2, 3)));
  two.insert(two.end(), second.begin(), second.end());
  found.emplace_back("of two maps, one after the other", two);
  return found;
}

void erase(IdMap* map, int64_t id) { CHECK(map->erase(id, IdMap::hash(id))); }
void erase(Candidates* map, int64_t id) { CHECK(map->erase(id)); }

// Returns an empty map with another seed.
template <class Map>
Map seeded_anew(Map map) {
  Ids order = listed(filled(IdMap(), random_ids(kIds, 8)));
  order.resize(1000);
  map = filled(std::move(map), order);
  CHECK(listed(map) != order);
  for (const int64_t id : order) erase(&map, id);
  return map;
}

template <class Make>
void check_costs(const Make& make) {
  auto plain = make();
  const int64_t usual = total_probes(&plain, random_ids(kIds, 7));
  const auto check = [&](const std::pair<std::string, Ids>& ids) {
    auto map = make();
    const int64_t total = total_probes(&map, ids.second);
    if (2 * total > 3 * usual) {
      std::fprintf(stderr, "%s: %ld probes, random ids %ld\n", ids.first.c_str(), static_cast<long>(total),
                   static_cast<long>(usual));
    }
    CHECK(2 * total <= 3 * usual);
    CHECK(map.size() == static_cast<int64_t>(ids.second.size()));
  };
  for (const auto& ids : patterns()) check(ids);
  for (const auto& ids : own_orders()) check(ids);
}

// Ids are inserted into an emptied map in its own order, as when it loads its own save.
template <class Map>
void back_in_its_own_order(Map map) {
  const Ids ids = random_ids(kIds, 4);
  int64_t usual = 0;
  for (const int64_t id : ids) {
    add(&map, id);
    usual += probes(map, id);
  }
  for (int round = 0; round < 3; ++round) {
    const Ids order = listed(map);
    map.clear();
    int64_t total = 0;
    for (const int64_t id : order) {
      add(&map, id);
      total += probes(map, id);
    }
    CHECK(2 * total <= 3 * usual);
  }
}

// Ids that remain after other ids were removed in map order, and ids of one part of a save, have neighbouring
// hashes. A map with space for exactly these ids must work well with them too.
TEST(neighbours) {
  IdMap map = filled(IdMap(), random_ids(kIds, 6));
  const Ids order = listed(map);
  const size_t kept = order.size() * 9 / 10;
  for (size_t i = 0; i < kept; ++i) erase(&map, order[i]);
  map.shrink();
  CHECK(map.growth(1) == 0);
  int64_t total = 0;
  for (size_t i = kept; i < order.size(); ++i) total += probes(map, order[i]);
  CHECK(2 * total <= 3 * static_cast<int64_t>(order.size() - kept));
  IdMap piece(static_cast<int64_t>(order.size() - kept));
  total = 0;
  for (size_t i = kept; i < order.size(); ++i) {
    add(&piece, order[i]);
    total += probes(piece, order[i]);
  }
  CHECK(2 * total <= 3 * static_cast<int64_t>(order.size() - kept));
}

// The deduplication of batches, which uses a hash table with twice as many cells as ids.
TEST(neighbours_in_a_batch) {
  const Ids order = listed(filled(IdMap(), random_ids(kIds, 5)));
  std::set<uint64_t> homes;
  for (int64_t i = 0; i < 2048; ++i)
    homes.insert(rec_sdk::Deduplicator::home(order[static_cast<size_t>(i)], 12));
  CHECK(homes.size() > 1400);  // the expected number is 1612
}

// The order in which a map lists ids does not change between versions, if the ids are inserted in random
// order and the map grows at once.
TEST(order_of_random_ids) {
  uint64_t sum = 0;
  for (const int64_t id : listed(filled(IdMap(), random_ids(3000, 11)))) {
    sum = sum * 0x9E3779B97F4A7C15ull + static_cast<uint64_t>(id);
  }
  CHECK(sum == 0xf9dbff8456ece466ull);
}

TEST(costs) {
  check_costs([] { return IdMap(); });
  check_costs([] { return seeded_anew(IdMap()); });
  check_costs([] { return Candidates(false); });
  check_costs([] { return seeded_anew(Candidates(true)); });
}

TEST(back_in_their_own_order) {
  back_in_its_own_order(IdMap());
  back_in_its_own_order(Candidates(true));
}

}  // namespace
