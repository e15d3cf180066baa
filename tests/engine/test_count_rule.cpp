// Admission by a count: lookups of a batch decide together, and a batch that is undone was never counted.
#include "tests/engine/rule_cases.h"

int main() {
  using namespace rec_sdk;
  AdmissionCase one({{"count", {{"threshold", 3}}}});
  for (const bool dropped : {true, false}) {
    CHECK((one.admitted({8, 9, 8, 8, 5}, dropped) == std::vector<int64_t>{8, 8, 8}));
    CHECK((one.counts == std::vector<uint32_t>{3}));
    CHECK(one.admission->candidates.size() == (dropped ? 0 : 2) && one.admission->counts_each());
  }
  CHECK((one.admitted({5, 9, 9, 8}) == std::vector<int64_t>{9, 9}));
  CHECK(one.admission->set_candidates({{70, {2, 0, 0, 0}}}));
  CHECK((one.admitted({70, 5}) == std::vector<int64_t>{70}));
  // A batch in the middle of which the map grows, twice.
  std::vector<int64_t> many, twice;
  for (int64_t id = 0; id < 5000; ++id) many.push_back(id * 977);
  CHECK(one.admitted(many).empty());
  twice.insert(twice.end(), many.begin(), many.end());
  twice.insert(twice.end(), many.begin(), many.end());
  CHECK(one.admitted(twice) == twice);
  refuses("count", {});
  refuses("count", {{"threshold", 3}, {"alpha", 1}});
  CHECK_THROWS(Rules({{"count", {{"threshold", 3}}}, {"probability", {{"probability", 1}}}}),
               std::invalid_argument);
  CHECK_THROWS(Rules({{"count", {{"threshold", 3}}}, {"count", {{"threshold", 4}}}}), std::invalid_argument);
  return check_result();
}
