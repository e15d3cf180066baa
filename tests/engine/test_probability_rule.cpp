// Admission by chance: a coin for each id and batch.
#include <numeric>

#include "tests/engine/rule_cases.h"

int main() {
  using namespace rec_sdk;
  std::vector<int64_t> ids(4000);
  std::iota(ids.begin(), ids.end(), -2000);
  AdmissionCase half({{"probability", {{"probability", 0.5}}}}),
      other({{"probability", {{"probability", 0.5}}}}, "u");
  const std::vector<int64_t> dropped = half.admitted(ids, true);
  CHECK(half.admitted(ids) == dropped);  // planned again, it has the same coins
  CHECK(dropped.size() > 1900 && dropped.size() < 2100);
  CHECK(half.admitted(ids) != dropped && other.admitted(ids) != dropped);
  CHECK((half.counts.size() > 1900 && half.counts[0] == 0 && half.admission->bytes() == 0));
  CHECK(!half.admission->set_candidates({{1, {2, 0, 0, 0}}}));
  AdmissionCase every({{"probability", {{"probability", 1}}}});
  CHECK(every.admitted(ids) == ids);
  refuses("probability", {{"probability", 0}});
  refuses("probability", {{"probability", 1.5}});
  return check_result();
}
