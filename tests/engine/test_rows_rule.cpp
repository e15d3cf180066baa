// A bound of rows, and of candidates.
#include "tests/engine/rule_cases.h"

int main() {
  using namespace rec_sdk;
  const Rules rules({{"rows", {{"most", 8}}}});
  CHECK(rules.has_bound() && !rules.evicts_at_intervals());
  const EvictionRule& rule = *rules.evictions()[0];
  CHECK(!rule.due(8, 8) && rule.due(9, 0) && rule.due(0, 9));
  CHECK(rule.evicts_candidates() && !rule.takes_any_number());
  std::vector<Evictable> known;
  for (int64_t id = 0; id < 8; ++id) known.push_back({id, 5, 0, static_cast<uint32_t>(id)});
  CHECK(chosen(rules, known).empty());
  known.push_back({8, 4, 0, 0});  // down to 7: the least, then those that were idle for longest
  CHECK((chosen(rules, known) == std::vector<int64_t>{7, 8}));
  known[8].held = true;  // it counts and stays
  CHECK((chosen(rules, known) == std::vector<int64_t>{6, 7}));
  known[7].reason = EvictReason::kIdle;  // it leaves already
  CHECK(chosen(rules, known).empty());
  refuses("rows", {{"most", 0}});
  return check_result();
}
