// LFU against counts that are halved.
#include <algorithm>
#include <map>

#include "tests/engine/policy_model.h"

namespace {

using namespace policy_model;

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
  void warm(uint32_t slot, double heat) override { counts_[slot] = std::min<int64_t>(63, std::lround(heat)); }

 private:
  int64_t slots_, uses_ = 0, last_size_ = 1, batch_ = 0;
  std::map<uint32_t, int64_t> counts_;
};

}  // namespace

int main() {
  compare("lfu", [](int64_t slots, const Future&) { return std::make_unique<Frequency>(slots); });
  frequent_rows_stay("lfu");
  return check_result();
}
