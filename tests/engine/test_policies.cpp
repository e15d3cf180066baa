// Every cache policy, compared with the slow model in `policy_model.h`.
#include "tests/engine/policy_model.h"

namespace policy_model {
namespace {

class Recency : public Order {
 public:
  int64_t key(uint32_t, const Slot& use) const override { return use.last_batch; }
};

std::unique_ptr<Order> recency(int64_t, const Future&) { return std::make_unique<Recency>(); }

TEST(lru_policy) {
  compare("lru", recency);
  CHECK_THROWS(rec_sdk::make_cache_policy("no_such", 0, 4), std::invalid_argument);
}

// Tables are cleared, also when the batch counter overflows.
TEST(cleared_tables) {
  for (const uint32_t epoch : {0u, 0xFFFFFFFFu - 100}) {
    Cache cache("lru", recency, 4, 3, 40, epoch);
    for (int i = 0; i < 600; ++i) {
      cache.batch();
      if (i % 97 == 96) cache.clear();
    }
    CHECK(cache.evicted > 600 && cache.renumbered() == (epoch == 0 ? 0 : 1));
  }
}

// The last uses of the rows are so far apart that several keys share a bin.
TEST(uses_of_long_ago) {
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

// The order of LFU, with counts that are halved regularly.
class Frequency : public Order {
 public:
  explicit Frequency(int64_t slots) : slots_(slots) {}
  int64_t key(uint32_t slot, const Slot& use) const override {
    int64_t step = 1;  // number of batches
    while (last_size_ * step * 2 * 8 <= slots_) step *= 2;
    return counts_.at(slot) * 64 - std::min<int64_t>(63, (batch_ - use.last_batch) / step);
  }
  void begin_evictions(const Slots&, int64_t batch) override { batch_ = batch; }
  void insert(uint32_t slot, const Slot&) override { counts_[slot] = 0; }
  void touch(const std::vector<uint32_t>& slots, int64_t) override {
    for (const uint32_t slot : slots) counts_[slot] = std::min<int64_t>(63, counts_[slot] + 1);
    last_size_ = std::max<int64_t>(1, static_cast<int64_t>(slots.size()));
    uses_ += static_cast<int64_t>(slots.size());
    if (uses_ < 8 * slots_) return;
    uses_ = 0;
    for (auto& [slot, count] : counts_) count /= 2;
  }
  void warm(uint32_t slot, double heat) override { counts_[slot] = std::min<int64_t>(63, std::lround(heat)); }

 private:
  int64_t slots_, uses_ = 0, last_size_ = 1, batch_ = 0;
  std::map<uint32_t, int64_t> counts_;
};

TEST(lfu_policy) {
  compare("lfu", [](int64_t slots, const Future&) { return std::make_unique<Frequency>(slots); });
  frequent_rows_stay("lfu");
}

// The order of LRFU: uses decay. Scores of this model are never rescaled.
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
  void remove(uint32_t slot, const Slot& use) override {
    if (counting_) ghosts_[place(use.row)] = scores_[slot];
  }
  void insert(uint32_t slot, const Slot& use) override {
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
  void warm(uint32_t slot, double heat) override {
    scores_[slot] = clock() + std::lround(8 * std::log2(heat));
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

TEST(lrfu_policy) {
  compare("lrfu", [](int64_t slots, const Future&) { return std::make_unique<Score>(slots); });
  frequent_rows_stay("lrfu");
}

// The order of LRFU with announced batches.
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

TEST(look_ahead_policy) {
  const auto make = [](int64_t slots, const Future& future) {
    return std::make_unique<LookAhead>(slots, future);
  };
  compare("look_ahead", make, true);
  frequent_rows_stay("look_ahead");
}

TEST(only_so_many_batches_are_announced) {
  FutureUses future(4, 2);
  CHECK(!future.any());
  std::vector<uint64_t> tickets;
  for (uint64_t i = 0; i < FutureUses::kMost; ++i) {
    tickets.push_back(future.begin());
    future.add(1);
    future.confirm();
  }
  CHECK_THROWS(future.begin(), std::runtime_error);
  future.forget(tickets[3]);  // the oldest announcement ends
  CHECK_THROWS(future.begin(), std::runtime_error);
  for (const uint64_t ticket : tickets) future.forget(ticket);
  CHECK(!future.any() && future.distance(1) == FutureUses::kNever);
  future.begin();  // an announcement that an exception prevents from being confirmed
  future.add(2);
  CHECK(!future.any() && future.distance(2) == FutureUses::kNever);
}
}  // namespace
}  // namespace policy_model
