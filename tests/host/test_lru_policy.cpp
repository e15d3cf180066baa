// LRU against a list, with pins.
#include <algorithm>
#include <cstdint>
#include <list>
#include <random>
#include <stdexcept>
#include <vector>

#include "tests/host/check.h"
#include "torch_npu_ext/host/cache_policy.h"

namespace {

void against_a_list(uint64_t seed, int64_t first_slot, int64_t slots, int batches) {
  std::mt19937_64 random(seed);
  const auto policy = rec_sdk::make_cache_policy("lru", first_slot, slots);
  std::list<uint32_t> order;  // least recently used first
  std::vector<uint32_t> pins(static_cast<size_t>(first_slot + slots));
  std::vector<uint32_t> resident, free;
  for (int64_t s = 0; s < slots; ++s) free.push_back(static_cast<uint32_t>(first_slot + s));
  for (int batch = 0; batch < batches; ++batch) {
    for (uint32_t& pin : pins) pin = random() % 4 == 0;
    std::vector<uint32_t> touched(order.begin(), order.end());
    std::shuffle(touched.begin(), touched.end(), random);
    if (!touched.empty()) touched.resize(random() % (touched.size() + 1));
    policy->touch(touched.data(), static_cast<int64_t>(touched.size()));
    for (const uint32_t slot : touched) {
      order.remove(slot);
      order.push_back(slot);
    }
    std::vector<uint32_t> expected;
    const size_t wanted = random() % static_cast<uint64_t>(slots);
    for (auto it = order.begin(); it != order.end() && expected.size() < wanted;) {
      if (pins[*it] != 0) {
        ++it;
        continue;
      }
      expected.push_back(*it);
      it = order.erase(it);
    }
    std::vector<uint32_t> victims(expected.size());
    policy->evict(static_cast<int64_t>(victims.size()), pins.data(), victims.data());
    CHECK(victims == expected);
    free.insert(free.end(), victims.begin(), victims.end());
    std::shuffle(free.begin(), free.end(), random);
    std::vector<uint32_t> brought(free.begin(),
                                  free.begin() + static_cast<int64_t>(random() % (free.size() + 1)));
    free.erase(free.begin(), free.begin() + static_cast<int64_t>(brought.size()));
    policy->touch(brought.data(), static_cast<int64_t>(brought.size()));
    order.insert(order.end(), brought.begin(), brought.end());
    if (batch % 97 == 96) {
      policy->clear();
      free.insert(free.end(), order.begin(), order.end());
      order.clear();
    }
  }
}

}  // namespace

int main() {
  against_a_list(1, 0, 1, 300);
  against_a_list(2, 5, 7, 3000);
  against_a_list(3, 100, 60, 2000);
  CHECK_THROWS(rec_sdk::make_cache_policy("mru", 0, 4), std::invalid_argument);
  return check_result();
}
