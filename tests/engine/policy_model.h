// A model of a cache, for tests of policies. It computes victims slowly, with sums and sorts. Batches in
// flight end in any order, rows are fetched and evicted, and announced batches are planned, withdrawn or
// forgotten. The test of a policy provides its order.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <random>
#include <set>
#include <stdexcept>
#include <string>
#include <vector>

#include "tests/engine/check.h"
#include "torch_npu_ext/engine/policy/cache_policy.h"

namespace policy_model {

using rec_sdk::FutureUses;
using rec_sdk::PlanBuffers;
using rec_sdk::SlotUses;

struct Slot {
  int64_t row;
  int64_t last_batch;  // the last batch that used the row
};
using Slots = std::map<uint32_t, Slot>;  // the slots that contain a row

// The expected future uses: the rows of each announced batch.
struct Future {
  std::map<uint64_t, std::set<int64_t>> batches;  // ticket -> rows of the batch
  // Returns the number of tickets from the oldest announced batch to `last`.
  uint64_t span(uint64_t last) const { return batches.empty() ? 0 : last - batches.begin()->first + 1; }
  int64_t distance(int64_t row) const {  // -1 if no batch needs the row
    for (const auto& [ticket, rows] : batches) {
      if (rows.count(row) != 0) return static_cast<int64_t>(ticket - batches.begin()->first);
    }
    return -1;
  }
};

// The order in which a policy chooses victims.
class Order {
 public:
  virtual ~Order() = default;
  virtual int64_t key(uint32_t slot, const Slot& use) const = 0;
  virtual bool waits(const Slot&) const { return false; }
  virtual void begin_evictions(const Slots&, int64_t /*batch*/) {}
  virtual void remove(uint32_t, const Slot&) {}
  virtual void insert(uint32_t, const Slot&) {}
  virtual void touch(const std::vector<uint32_t>&, int64_t /*batch*/) {}
  virtual void warm(uint32_t, double /*heat*/) {}
};

using MakeOrder = std::function<std::unique_ptr<Order>(int64_t slots, const Future& future)>;

// A cache of one table in slots [first_slot, first_slot + slots), which compares the policy with its model in
// random batches.
class Cache {
 public:
  Cache(const std::string& name, const MakeOrder& make_order, uint64_t seed, int64_t first_slot,
        int64_t slots, uint32_t epoch = 0)
      : random(seed),
        first_slot_(first_slot),
        count_(slots),
        uses_(first_slot + slots, epoch),
        future_(first_slot + slots, 1),
        policy_(rec_sdk::make_cache_policy(name, first_slot, slots)),
        order_(make_order(slots, expected_future_)) {}

  void batch() {
    if (in_flight_.empty() && batch_ > 0 && random() % 2 == 0) warm();
    while (random() % 2 == 0 && expected_future_.span(last_ticket_) < FutureUses::kMost) announce();
    while (random() % 3 == 0 && !expected_future_.batches.empty()) forget();
    uses_.begin_batch(0);
    ++batch_;
    used_.clear();
    const size_t few = 1 + random() % 6;
    for (auto& [slot, use] : slots_) {
      if (random() % few != 0) continue;
      use.last_batch = batch_;
      uses_.touch(slot);
      used_.push_back(slot);
    }
    evict(static_cast<int64_t>(random() % static_cast<uint64_t>(count_)));
    bring_in();
    for (const auto& [slot, use] : slots_) {
      const int64_t distance = expected_future_.distance(use.row);
      // Tickets in between that were forgotten also count for the distance.
      CHECK(distance < 0 ? future_.distance(slot) == FutureUses::kNever
                         : static_cast<int64_t>(future_.distance(slot)) == distance);
    }
    policy_->touch(used_.data(), static_cast<int64_t>(used_.size()));
    order_->touch(used_, batch_);
    hold();
    while (in_flight_.size() > random() % 4) release();
  }

  // Removes all rows, as when the table is cleared.
  void clear() {
    while (!in_flight_.empty()) release();
    while (!expected_future_.batches.empty()) forget();
    for (const auto& entry : slots_) uses_.forget(entry.first);
    slots_.clear();
    queue_.clear();
    policy_->clear();
  }

  uint32_t renumbered() const { return uses_.renumbered(); }

  std::mt19937_64 random;
  int64_t evicted = 0, waiting_evicted = 0, warmed = 0;

 private:
  struct Flight {
    std::unique_ptr<PlanBuffers> plan = std::make_unique<PlanBuffers>();
    std::vector<int32_t> slots;
  };

  int64_t any_row() { return static_cast<int64_t>(random() % static_cast<uint64_t>(11 * count_)); }
  const std::pair<const uint32_t, Slot>* find(int64_t row) const {
    for (const auto& entry : slots_) {
      if (entry.second.row == row) return &entry;
    }
    return nullptr;
  }

  void announce() {
    const uint64_t ticket = last_ticket_ = future_.begin();
    std::set<int64_t>& rows = expected_future_.batches[ticket];
    for (size_t i = random() % static_cast<size_t>(count_ + 1); i-- > 0;) {
      const int64_t row = any_row();
      rows.insert(row);
      const auto* resident = find(row);
      if (resident != nullptr) {
        future_.add(resident->first);
      } else {
        future_.add_absent(0, row);
      }
    }
    future_.confirm();
  }
  void forget() {
    auto batch = expected_future_.batches.begin();
    if (random() % 3 == 0) std::advance(batch, random() % expected_future_.batches.size());
    future_.forget(batch->first);
    future_.forget(batch->first);  // has no effect
    expected_future_.batches.erase(batch);
  }

  bool held(uint32_t slot) const {
    const auto has = [slot](const Flight& f) {
      return std::find(f.slots.begin(), f.slots.end(), static_cast<int32_t>(slot)) != f.slots.end();
    };
    return slots_.at(slot).last_batch == batch_ || std::any_of(in_flight_.begin(), in_flight_.end(), has);
  }

  // Takes victims from the queue, as the comments of VictimQueue describe.
  void take(int64_t count, bool all, std::vector<uint32_t>* victims) {
    std::vector<uint32_t> kept;
    size_t p = 0;
    for (; p < queue_.size() && count > 0; ++p) {
      const auto use = slots_.find(queue_[p]);
      if (std::find(victims->begin(), victims->end(), queue_[p]) != victims->end()) continue;
      if (use == slots_.end() || use->second.last_batch >= queued_at_) continue;
      if (!all && order_->waits(use->second)) continue;
      if (held(queue_[p])) {
        kept.push_back(queue_[p]);
        continue;
      }
      victims->push_back(queue_[p]);
      --count;
    }
    kept.insert(kept.end(), queue_.begin() + static_cast<int64_t>(p), queue_.end());
    queue_ = kept;
  }
  void refill(int64_t wanted, const std::vector<uint32_t>& gone) {
    std::vector<std::pair<int64_t, uint32_t>> order;
    for (const auto& [slot, use] : slots_) {
      if (use.last_batch == batch_ || std::find(gone.begin(), gone.end(), slot) != gone.end()) continue;
      order.emplace_back(order_->key(slot, use), slot);
    }
    std::sort(order.begin(), order.end());
    wanted = std::max(wanted, count_ / 8);
    queue_.clear();
    for (size_t i = 0; i < order.size(); ++i) {
      if (wanted <= 0 && order[i].first != order[i - 1].first) break;
      queue_.push_back(order[i].second);
      wanted -= !held(order[i].second);
    }
    queued_at_ = batch_;
  }

  void evict(int64_t wanted) {
    int64_t free = 0;
    for (const auto& [slot, use] : slots_) free += !held(slot);
    wanted = std::min(wanted, free);
    if (wanted == 0) return;
    order_->begin_evictions(slots_, batch_);
    std::vector<uint32_t> expected;
    take(wanted, false, &expected);
    const int64_t missing = wanted - static_cast<int64_t>(expected.size());
    if (missing > 0) {
      refill(missing, expected);
      take(missing, true, &expected);
    }
    uses_.prepare_held();
    std::vector<uint32_t> victims(expected.size()), rows;
    policy_->evict(wanted, &uses_, future_, victims.data());
    if (uses_.renumbered() != 0)
      expected = victims;  // after a renumbering, the order of rows that are not held is lost
    CHECK(victims == expected && std::set<uint32_t>(victims.begin(), victims.end()).size() == victims.size());
    future_.reserve(0, wanted);
    for (const uint32_t slot : expected) {
      CHECK(slots_.count(slot) == 1 && !held(slot) && uses_.last_batch(slot) == 0);
      const Slot use = slots_.at(slot);
      waiting_evicted += expected_future_.distance(use.row) >= 0;
      rows.push_back(static_cast<uint32_t>(use.row));
      order_->remove(slot, use);
      future_.remove(0, slot, use.row);
      slots_.erase(slot);
    }
    policy_->remove(expected.data(), rows.data(), wanted);
    evicted += wanted;
  }

  void bring_in() {
    std::vector<uint32_t> came, rows;
    for (uint32_t slot = first_slot_; slot < first_slot_ + count_; ++slot) {
      const int64_t row = any_row();
      if (slots_.count(slot) != 0 || find(row) != nullptr || random() % 4 == 0) continue;
      slots_[slot] = {row, batch_};
      uses_.touch(slot);
      order_->insert(slot, slots_[slot]);
      future_.insert(0, slot, row);
      came.push_back(slot);
      rows.push_back(static_cast<uint32_t>(row));
      used_.push_back(slot);
    }
    policy_->insert(came.data(), rows.data(), static_cast<int64_t>(came.size()));
  }

  // Fetches rows without a batch, as cache warming does.
  void warm() {
    std::vector<uint32_t> came, rows;
    std::vector<float> heats;
    for (uint32_t slot = first_slot_; slot < first_slot_ + count_; ++slot) {
      const int64_t row = any_row();
      if (slots_.count(slot) != 0 || find(row) != nullptr || random() % 2 == 0) continue;
      slots_[slot] = {row, batch_};
      uses_.touch(slot);
      order_->insert(slot, slots_[slot]);
      future_.insert(0, slot, row);
      came.push_back(slot);
      rows.push_back(static_cast<uint32_t>(row));
      heats.push_back(static_cast<float>(std::exp2(static_cast<double>(random() % 60) / 8 - 3)));
    }
    order_->begin_evictions(slots_, batch_);
    for (size_t i = 0; i < came.size(); ++i) order_->warm(came[i], heats[i]);
    policy_->insert(came.data(), rows.data(), static_cast<int64_t>(came.size()));
    policy_->warm(came.data(), heats.data(), static_cast<int64_t>(came.size()), uses_);
    warmed += static_cast<int64_t>(came.size());
  }

  void hold() {
    Flight flight;
    flight.slots.assign(used_.begin(), used_.end());
    flight.plan->unique_slots = flight.slots.data();
    flight.plan->uniques = static_cast<int64_t>(used_.size());
    flight.plan->table_offsets = {0, static_cast<int32_t>(used_.size())};
    uses_.hold(flight.plan.get());
    in_flight_.push_back(std::move(flight));
  }
  void release() {
    const size_t i = random() % 3 == 0 ? random() % in_flight_.size() : 0;
    uses_.release(*in_flight_[i].plan);
    in_flight_.erase(in_flight_.begin() + static_cast<int64_t>(i));
  }

  int64_t first_slot_, count_, batch_ = 0, queued_at_ = 0;
  SlotUses uses_;
  FutureUses future_;
  std::unique_ptr<rec_sdk::CachePolicy> policy_;
  Slots slots_;
  Future expected_future_;
  std::unique_ptr<Order> order_;
  uint64_t last_ticket_ = 0;
  std::vector<uint32_t> queue_, used_;
  std::vector<Flight> in_flight_;
};

inline void run_batches(const std::string& name, const MakeOrder& make_order, uint64_t seed,
                        int64_t first_slot, int64_t slots, int batches) {
  Cache cache(name, make_order, seed, first_slot, slots);
  for (int i = 0; i < batches; ++i) cache.batch();
  CHECK(cache.evicted > batches / 10);
  CHECK(cache.waiting_evicted > 0 && cache.warmed > 0);
}

// Compares the policy of this name with the model, which uses the given order.
inline void compare(const std::string& name, const MakeOrder& make_order, bool looks_ahead = false) {
  CHECK(rec_sdk::make_cache_policy(name, 0, 4)->looks_ahead() == looks_ahead);
  run_batches(name, make_order, 1, 0, 2, 2000);
  run_batches(name, make_order, 2, 5, 7, 3000);
  run_batches(name, make_order, 3, 100, 60, 1000);
}

// Checks that a row that most batches used stays in the cache while rows that are used only once pass
// through. It is evicted if these uses were long ago.
inline void frequent_rows_stay(const std::string& name) {
  SlotUses uses(4);
  const FutureUses future(4, 1);
  const auto policy = rec_sdk::make_cache_policy(name, 0, 4);
  const uint32_t slots[] = {0, 1, 2, 3}, rows[] = {0, 1, 2, 3};
  uint32_t victim = 0, row = 4;
  uses.begin_batch(0);
  for (const uint32_t slot : slots) uses.touch(slot);
  policy->insert(slots, rows, 4);
  policy->touch(slots, 4);
  const auto pass = [&] {
    uses.begin_batch(0);
    policy->evict(1, &uses, future, &victim);
    const uint32_t left = victim;
    uses.touch(left);
    policy->insert(&left, &row, 1);
    policy->touch(&left, 1);
    ++row;
    return left;
  };
  pass();
  for (int i = 0; i < 6; ++i) {
    uses.begin_batch(0);
    uses.touch(3);
    policy->touch(slots + 3, 1);
  }
  for (int i = 0; i < 12; ++i) CHECK(pass() != 3);
  int passes = 0;
  while (passes < 1000 && pass() != 3) ++passes;
  CHECK(passes < 1000);
}

}  // namespace policy_model
