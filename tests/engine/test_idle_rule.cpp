// Eviction by batches without the id.
#include "tests/engine/rule_cases.h"

int main() {
  using namespace rec_sdk;
  const Rules rules({{"idle", {{"batches", 3}}}});
  CHECK(rules.columns().has(Column::kLastUse) && rules.evicts_at_intervals());
  const std::vector<Evictable> known = {{1, 0, 0, 2}, {2, 0, 0, 3}, {3, 0, 0, UINT32_MAX}};
  CHECK((chosen(rules, known) == std::vector<int64_t>{2, 3}));
  // The first rule of the table in rules.cpp gives the reason, in whatever order rules are given.
  const Rules both({{"idle", {{"batches", 3}}}, {"age", {{"seconds", 1}}}});
  CHECK(both.evictions()[0]->reason() == EvictReason::kAge);
  std::vector<Evictable> old = {{1, 0, 0, 3}};
  LifeClock clock;
  clock.timestamp = 5;
  for (const EvictionRule* rule : both.evictions()) rule->choose(clock, &old);
  CHECK(old[0].reason == EvictReason::kAge);
  refuses("idle", {{"batches", 0}});
  refuses("idle", {{"batches", 3}, {"seconds", 3}});
  return check_result();
}
