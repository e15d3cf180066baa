// Admission by shows and clicks.
#include "tests/engine/rule_cases.h"

int main() {
  using namespace rec_sdk;
  AdmissionCase one({{"showclick", {{"threshold", 2}, {"alpha", 0.5}, {"beta", 1}}}});
  CHECK(Rules({{"showclick", {{"threshold", 2}, {"beta", 1}}}}).needs_clicks());
  CHECK(!Rules({{"showclick", {{"threshold", 2}}}}).needs_clicks());
  CHECK((one.admitted({1, 2, 2, 3}, false, {1, 1, 0, 0}) == std::vector<int64_t>{2, 2}));
  CHECK((one.admitted({1, 3, 3}, false, {0, 0, 0}) == std::vector<int64_t>{1}));
  CHECK((one.admitted({3}, false, {0}) == std::vector<int64_t>{3}));
  CHECK(one.admission->worth({3, 0, 2, 0}) == 3.5);
  refuses("showclick", {{"alpha", 1}});
  return check_result();
}
