// LRU against a sort of all slots, with batches in flight that end in any order, and epochs that begin anew.
#include <algorithm>
#include <cstdint>
#include <map>
#include <memory>
#include <random>
#include <stdexcept>
#include <vector>

#include "tests/engine/policy_model.h"

namespace {

using rec_sdk::PlanBuffers;
using rec_sdk::SlotUses;

// Batches of one table over [first_slot, first_slot + slots), and what they should do.
class Cache {
 public:
  Cache(uint64_t seed, int64_t first_slot, int64_t slots, uint32_t epoch)
      : random(seed),
        first_slot_(first_slot),
        slots_(slots),
        uses_(first_slot + slots, epoch),
        policy_(rec_sdk::make_cache_policy("lru", first_slot, slots)) {}

  void batch() {
    uses_.begin_batch(0);
    ++batches_;
    renumbered = uses_.renumbered();
    std::vector<int32_t> used;
    const size_t few = 1 + random() % 3;
    for (auto& [slot, last] : last_use_) {
      if (random() % few != 0) continue;
      last = batches_;
      uses_.touch(slot);
      used.push_back(static_cast<int32_t>(slot));
    }
    evict(static_cast<int64_t>(random() % static_cast<uint64_t>(slots_)));
    for (int64_t slot = first_slot_; slot < first_slot_ + slots_; ++slot) {
      if (last_use_.count(slot) != 0 || random() % 2 != 0) continue;
      last_use_[slot] = batches_;
      uses_.touch(slot);
      used.push_back(static_cast<int32_t>(slot));
    }
    hold(used);
    while (in_flight_.size() > random() % 4) release();
  }

  void clear() {
    while (!in_flight_.empty()) release();
    for (const auto& [slot, last] : last_use_) uses_.forget(slot);
    last_use_.clear();
    policy_->clear();
  }

  std::mt19937_64 random;
  uint32_t renumbered = 0;

 private:
  struct Flight {
    std::unique_ptr<PlanBuffers> plan = std::make_unique<PlanBuffers>();
    std::vector<int32_t> slots;
  };

  bool held(int64_t slot) const {
    const auto has = [slot](const Flight& f) {
      return std::find(f.slots.begin(), f.slots.end(), slot) != f.slots.end();
    };
    return last_use_.at(slot) == batches_ || std::any_of(in_flight_.begin(), in_flight_.end(), has);
  }

  void evict(int64_t wanted) {
    std::vector<std::pair<int64_t, uint32_t>> order;
    for (const auto& [slot, last] : last_use_) {
      if (!held(slot)) order.emplace_back(last, static_cast<uint32_t>(slot));
    }
    std::sort(order.begin(), order.end());
    order.resize(std::min(order.size(), static_cast<size_t>(wanted)));
    uses_.prepare_held();
    std::vector<uint32_t> victims(order.size());
    policy_->evict(static_cast<int64_t>(victims.size()), &uses_, rec_sdk::FutureUses(), victims.data());
    // The order of what was not held is not kept when epochs begin anew.
    if (uses_.renumbered() == 0) {
      for (size_t i = 0; i < order.size(); ++i) CHECK(victims[i] == order[i].second);
    }
    std::sort(victims.begin(), victims.end());
    CHECK(std::adjacent_find(victims.begin(), victims.end()) == victims.end());
    for (const uint32_t slot : victims) {
      CHECK(last_use_.count(slot) == 1 && !held(slot) && uses_.last_batch(slot) == 0);
      last_use_.erase(slot);
    }
  }

  void hold(const std::vector<int32_t>& used) {
    Flight flight;
    flight.slots = used;
    flight.plan->unique_slots = flight.slots.data();
    flight.plan->uniques = static_cast<int64_t>(used.size());
    flight.plan->table_offsets = {0, static_cast<int32_t>(used.size())};
    uses_.hold(flight.plan.get());
    in_flight_.push_back(std::move(flight));
  }

  void release() {
    const size_t i = random() % 3 == 0 ? random() % in_flight_.size() : 0;
    uses_.release(*in_flight_[i].plan);
    in_flight_.erase(in_flight_.begin() + static_cast<int64_t>(i));
  }

  int64_t first_slot_, slots_;
  SlotUses uses_;
  std::unique_ptr<rec_sdk::CachePolicy> policy_;
  std::map<int64_t, int64_t> last_use_;  // slot -> batch, of slots with a row
  std::vector<Flight> in_flight_;
  int64_t batches_ = 0;
};

void run(uint64_t seed, int64_t first_slot, int64_t slots, int batches, uint32_t epoch = 0) {
  Cache cache(seed, first_slot, slots, epoch);
  for (int i = 0; i < batches; ++i) {
    cache.batch();
    if (i % 97 == 96) cache.clear();
  }
  CHECK(cache.renumbered == (epoch == 0 ? 0 : 1));
}

// Uses too far apart for a bin each.
void long_ago() {
  SlotUses uses(6, 0);
  const auto policy = rec_sdk::make_cache_policy("lru", 1, 5);
  const uint32_t last[] = {0, 900000, 3, 899999, 2, 0};
  for (int64_t slot = 0; slot < 6; ++slot) uses.restore(slot, last[slot]);
  for (int i = 0; i < 1000000; ++i) uses.begin_batch(0);
  std::vector<uint32_t> victims(4);
  policy->evict(1, &uses, rec_sdk::FutureUses(), victims.data());
  policy->evict(3, &uses, rec_sdk::FutureUses(), victims.data() + 1);
  CHECK((victims == std::vector<uint32_t>{4, 2, 3, 1}));
}

class Recency : public policy_model::Order {
 public:
  int64_t key(uint32_t, const policy_model::Slot& use) const override { return use.last_batch; }
};

}  // namespace

int main() {
  run(1, 0, 1, 300);
  run(2, 5, 7, 3000);
  run(3, 100, 60, 2000);
  run(4, 3, 40, 300, 0xFFFFFFFFu - 100);
  long_ago();
  policy_model::compare("lru",
                        [](int64_t, const policy_model::Future&) { return std::make_unique<Recency>(); });
  CHECK_THROWS(rec_sdk::make_cache_policy("no_such", 0, 4), std::invalid_argument);
  return check_result();
}
