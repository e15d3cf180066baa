// Eviction by age: seconds are exact at both ends of their range.
#include "tests/engine/rule_cases.h"

int main() {
  using namespace rec_sdk;
  const Rules rules({{"age", {{"seconds", 10}}}});
  CHECK(rules.needs_timestamps() && rules.evicts_at_intervals() && !rules.has_bound());
  LifeClock clock;
  clock.timestamp = 100;
  const std::vector<Evictable> known = {
      {1, 0, 89, 0}, {2, 0, 90, 0}, {3, 0, 200, 0}, {4, 0, INT64_MIN + 1, 0}, {5, 0, 100, 0}};
  CHECK((chosen(rules, known, clock) == std::vector<int64_t>{1, 4}));
  CHECK(rules.evicts_by(EvictReason::kAge) && rules.evictions()[0]->takes_any_number());
  refuses("age", {{"seconds", 0}});
  refuses("age", {{"seconds", 2.5}});
  refuses("age", {});
  return check_result();
}
