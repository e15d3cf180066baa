// LRFU with announced batches, and what the engine remembers of those.
#include <stdexcept>

#include "tests/engine/policy_score.h"

namespace {

using namespace policy_model;

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
  compare(
      "look_ahead",
      [](int64_t slots, const Future& future) { return std::make_unique<LookAhead>(slots, future); }, true);
  frequent_rows_stay("look_ahead");
  only_so_many();
  return check_result();
}
