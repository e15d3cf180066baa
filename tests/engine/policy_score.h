// The order of LRFU, which look_ahead refines.
#pragma once

#include <algorithm>
#include <cmath>
#include <map>

#include "tests/engine/policy_model.h"

namespace policy_model {

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

}  // namespace policy_model
