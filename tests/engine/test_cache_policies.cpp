// Every policy against slow sums and sorts, with batches in flight that end in any order, rows that come and
// go, and announced batches that come, are forgotten or never do.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <map>
#include <memory>
#include <random>
#include <set>
#include <stdexcept>
#include <string>
#include <vector>

#include "tests/engine/check.h"
#include "torch_npu_ext/engine/policy/cache_policy.h"

namespace {

using rec_sdk::FutureUses;
using rec_sdk::PlanBuffers;
using rec_sdk::SlotUses;

struct Slot {
  int64_t row;
  int64_t last_batch;  // that used it
};
using Slots = std::map<uint32_t, Slot>;  // those with a row

// What announced batches need, as they are told.
struct Future {
  std::map<uint64_t, std::set<int64_t>> batches;  // ticket -> rows
  // Tickets from that of the oldest on.
  uint64_t span(uint64_t last) const { return batches.empty() ? 0 : last - batches.begin()->first + 1; }
  int64_t distance(int64_t row) const {  // -1: none needs it
    for (const auto& [ticket, rows] : batches) {
      if (rows.count(row) != 0) return static_cast<int64_t>(ticket - batches.begin()->first);
    }
    return -1;
  }
};

// The order of a policy.
class Order {
 public:
  virtual ~Order() = default;
  virtual int64_t key(uint32_t slot, const Slot& use) const = 0;
  virtual bool waits(const Slot&) const { return false; }
  virtual void begin_evictions(const Slots&, int64_t /*batch*/) {}
  virtual void leave(uint32_t, const Slot&) {}
  virtual void enter(uint32_t, const Slot&) {}
  virtual void touch(const std::vector<uint32_t>&, int64_t /*batch*/) {}
};

class Recency : public Order {
 public:
  int64_t key(uint32_t, const Slot& use) const override { return use.last_batch; }
};

class Frequency : public Order {
 public:
  explicit Frequency(int64_t slots) : slots_(slots) {}
  int64_t key(uint32_t slot, const Slot& use) const override {
    int64_t step = 1;  // batches
    while (last_size_ * step * 2 * 8 <= slots_) step *= 2;
    return counts_.at(slot) * 64 - std::min<int64_t>(63, (batch_ - use.last_batch) / step);
  }
  void begin_evictions(const Slots&, int64_t batch) override { batch_ = batch; }
  void enter(uint32_t slot, const Slot&) override { counts_[slot] = 0; }
  void touch(const std::vector<uint32_t>& slots, int64_t) override {
    for (const uint32_t slot : slots) counts_[slot] = std::min<int64_t>(63, counts_[slot] + 1);
    last_size_ = std::max<int64_t>(1, static_cast<int64_t>(slots.size()));
    uses_ += static_cast<int64_t>(slots.size());
    if (uses_ < 8 * slots_) return;
    uses_ = 0;
    for (auto& [slot, count] : counts_) count /= 2;
  }

 private:
  int64_t slots_, uses_ = 0, last_size_ = 1, batch_ = 0;
  std::map<uint32_t, int64_t> counts_;
};

// Scores are never moved down here.
class Score : public Order {
 public:
  explicit Score(int64_t slots) : slots_(slots) {}
  int64_t key(uint32_t slot, const Slot&) const override { return scores_.at(slot); }
  void begin_evictions(const Slots& slots, int64_t batch) override {
    if (counting_) return;
    counting_ = true;
    for (const auto& [slot, use] : slots) {
      scores_[slot] = clock() - std::min<int64_t>(127, batch - use.last_batch);
    }
  }
  void leave(uint32_t slot, const Slot& use) override {
    if (counting_) ghosts_[place(use.row)] = scores_[slot];
  }
  void enter(uint32_t slot, const Slot& use) override {
    const auto ghost = ghosts_.find(place(use.row));
    scores_[slot] = ghost == ghosts_.end() ? kNever : ghost->second;
  }
  void touch(const std::vector<uint32_t>& slots, int64_t) override {
    if (!counting_) return;
    uses_ += static_cast<int64_t>(slots.size());
    for (const uint32_t slot : slots) {
      const double above = std::exp2(static_cast<double>(scores_[slot] - clock()) / 8);
      scores_[slot] = clock() + std::lround(8 * std::log2(above + 1));
    }
  }

 private:
  static constexpr int64_t kNever = -1000000;
  int64_t clock() const { return uses_ / slots_; }
  int64_t place(int64_t row) const { return row < 8 * slots_ ? row : row % (8 * slots_); }

  int64_t slots_, uses_ = 0;
  bool counting_ = false;
  std::map<uint32_t, int64_t> scores_;
  std::map<int64_t, int64_t> ghosts_;
};

class LookAhead : public Score {
 public:
  LookAhead(int64_t slots, const Future& future) : Score(slots), future_(future) {}
  int64_t key(uint32_t slot, const Slot& use) const override {
    return waits(use) ? 1000000 - future_.distance(use.row) : Score::key(slot, use);
  }
  bool waits(const Slot& use) const override { return future_.distance(use.row) >= 0; }

 private:
  const Future& future_;
};

// Batches of one table over [first_slot, first_slot + slots), and what they should do.
class Cache {
 public:
  Cache(const std::string& name, uint64_t seed, int64_t first_slot, int64_t slots)
      : random(seed),
        first_slot_(first_slot),
        count_(slots),
        uses_(first_slot + slots),
        future_(first_slot + slots, 1),
        policy_(rec_sdk::make_cache_policy(name, first_slot, slots)) {
    if (name == "lru") order_ = std::make_unique<Recency>();
    if (name == "lfu") order_ = std::make_unique<Frequency>(slots);
    if (name == "lrfu") order_ = std::make_unique<Score>(slots);
    if (name == "look_ahead") order_ = std::make_unique<LookAhead>(slots, expected_future_);
    CHECK(policy_->looks_ahead() == (name == "look_ahead"));
  }

  void batch() {
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
      // Tickets that were forgotten in between count.
      CHECK(distance < 0 ? future_.distance(slot) == FutureUses::kNever
                         : static_cast<int64_t>(future_.distance(slot)) == distance);
    }
    policy_->touch(used_.data(), static_cast<int64_t>(used_.size()));
    order_->touch(used_, batch_);
    hold();
    while (in_flight_.size() > random() % 4) release();
  }

  std::mt19937_64 random;
  int64_t evicted = 0, waiting_evicted = 0;

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
    future_.forget(batch->first);  // nothing
    expected_future_.batches.erase(batch);
  }

  bool held(uint32_t slot) const {
    const auto has = [slot](const Flight& f) {
      return std::find(f.slots.begin(), f.slots.end(), static_cast<int32_t>(slot)) != f.slots.end();
    };
    return slots_.at(slot).last_batch == batch_ || std::any_of(in_flight_.begin(), in_flight_.end(), has);
  }

  // The queue, as its comments say.
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
    CHECK(victims == expected);
    future_.reserve(0, wanted);
    for (const uint32_t slot : expected) {
      CHECK(slots_.count(slot) == 1 && !held(slot) && uses_.last_batch(slot) == 0);
      const Slot use = slots_.at(slot);
      waiting_evicted += expected_future_.distance(use.row) >= 0;
      rows.push_back(static_cast<uint32_t>(use.row));
      order_->leave(slot, use);
      future_.leave(0, slot, use.row);
      slots_.erase(slot);
    }
    policy_->leave(expected.data(), rows.data(), wanted);
    evicted += wanted;
  }

  void bring_in() {
    std::vector<uint32_t> came, rows;
    for (uint32_t slot = first_slot_; slot < first_slot_ + count_; ++slot) {
      const int64_t row = any_row();
      if (slots_.count(slot) != 0 || find(row) != nullptr || random() % 4 == 0) continue;
      slots_[slot] = {row, batch_};
      uses_.touch(slot);
      order_->enter(slot, slots_[slot]);
      future_.enter(0, slot, row);
      came.push_back(slot);
      rows.push_back(static_cast<uint32_t>(row));
      used_.push_back(slot);
    }
    policy_->enter(came.data(), rows.data(), static_cast<int64_t>(came.size()));
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
  std::unique_ptr<Order> order_;
  Slots slots_;
  Future expected_future_;
  uint64_t last_ticket_ = 0;
  std::vector<uint32_t> queue_, used_;
  std::vector<Flight> in_flight_;
};

void run(const std::string& name, uint64_t seed, int64_t first_slot, int64_t slots, int batches) {
  Cache cache(name, seed, first_slot, slots);
  for (int i = 0; i < batches; ++i) cache.batch();
  CHECK(cache.evicted > batches / 10);
  CHECK(cache.waiting_evicted > 0);
}

// A row used by most batches stays while rows that come once pass through, unless it was long ago.
void frequent_rows_stay() {
  for (const std::string name : {"lfu", "lrfu", "look_ahead"}) {
    SlotUses uses(4);
    const FutureUses future(4, 1);
    const auto policy = rec_sdk::make_cache_policy(name, 0, 4);
    const uint32_t slots[] = {0, 1, 2, 3}, rows[] = {0, 1, 2, 3};
    uint32_t victim = 0, row = 4;
    uses.begin_batch(0);
    for (const uint32_t slot : slots) uses.touch(slot);
    policy->enter(slots, rows, 4);
    policy->touch(slots, 4);
    const auto pass = [&] {
      uses.begin_batch(0);
      policy->evict(1, &uses, future, &victim);
      const uint32_t left = victim;
      uses.touch(left);
      policy->enter(&left, &row, 1);
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
}

void only_so_many() {
  FutureUses future(4, 2);
  CHECK(!future.any());
  std::vector<uint64_t> tickets;
  for (uint64_t i = 0; i < FutureUses::kMost; ++i) {
    tickets.push_back(future.begin());
    future.add(1);
    future.confirm();
  }
  CHECK_THROWS(future.begin(), std::runtime_error);
  future.forget(tickets[3]);  // the oldest one is in the way
  CHECK_THROWS(future.begin(), std::runtime_error);
  for (const uint64_t ticket : tickets) future.forget(ticket);
  CHECK(!future.any() && future.distance(1) == FutureUses::kNever);
  future.begin();  // not confirmed: an exception ended it
  future.add(2);
  CHECK(!future.any() && future.distance(2) == FutureUses::kNever);
}

}  // namespace

int main() {
  for (const std::string name : {"lru", "lfu", "lrfu", "look_ahead"}) {
    run(name, 1, 0, 2, 2000);
    run(name, 2, 5, 7, 3000);
    run(name, 3, 100, 60, 1000);
  }
  frequent_rows_stay();
  only_so_many();
  return check_result();
}
