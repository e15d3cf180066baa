// Eviction of rows that the caller has marked.
#include "tests/engine/rule_cases.h"

int main() {
  using namespace rec_sdk;
  const Rules rules({{"norm", {{"least", 0.5}}}});
  CHECK(rules.columns().empty() && rules.evicts_by(EvictReason::kNorm));
  std::vector<Evictable> known = {{1, 0, 0, 0}, {2, 0, 0, 0}};
  known[1].small = true;
  CHECK((chosen(rules, known) == std::vector<int64_t>{2}));
  refuses("norm", {{"least", 0}});
  return check_result();
}
