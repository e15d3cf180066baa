// Eviction of a share of the rows, those with the lowest scores.
#include "tests/engine/rule_cases.h"

int main() {
  using namespace rec_sdk;
  const auto share = [](double value) { return Rules({{"share", {{"share", value}}}, {"score", {}}}); };
  const std::vector<Evictable> known = {{5, 2, 0, 0}, {4, 1, 0, 0}, {3, 1, 0, 0}, {2, 9, 0, 0}, {1, 9, 0, 0}};
  CHECK((chosen(share(0.4), known) == std::vector<int64_t>{4, 3}));
  CHECK((chosen(share(0.39), known) == std::vector<int64_t>{3}));  // of equal scores the lower id
  CHECK((chosen(share(0.01), known) == std::vector<int64_t>{3}));  // at least one
  CHECK(chosen(share(1), known).size() == 5 && chosen(share(1), {}).empty());
  // One that leaves by another rule counts for the share, and keeps its reason.
  std::vector<Evictable> some = known;
  some[2].reason = EvictReason::kIdle;
  CHECK((chosen(share(0.4), some) == std::vector<int64_t>{4}));
  const Rules rules = share(0.4);
  const EvictionRule& rule = *rules.evictions()[0];
  CHECK(!rule.evicts_candidates() && !rule.takes_any_number() && rule.at_intervals());
  refuses("share", {{"share", 0.4}});  // it needs scores
  CHECK_THROWS(share(0), std::invalid_argument);
  CHECK_THROWS(share(1.5), std::invalid_argument);
  return check_result();
}
