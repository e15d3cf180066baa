// Admission by a sketch: none too late, undone exactly, halved when it is due.
#include <map>
#include <random>

#include "tests/engine/rule_cases.h"

int main() {
  using namespace rec_sdk;
  AdmissionCase one({{"sketch", {{"threshold", 4}, {"bytes", 400}, {"halve_after", 40}}}});
  CHECK(one.admission->bytes() == 400 && !one.admission->counts_each());
  std::mt19937_64 random(3);
  std::map<int64_t, int> counts;
  for (int batch = 0; batch < 20; ++batch) {
    std::vector<int64_t> ids;
    for (int i = 0; i < 6; ++i) ids.push_back(static_cast<int64_t>(random() % 40));
    const std::vector<uint8_t> before = one.admission->state();
    const std::vector<int64_t> dropped = one.admitted(ids, true);
    CHECK(one.admission->state() == before);
    CHECK(one.admitted(ids) == dropped);
    for (const int64_t id : ids) ++counts[id];
    for (const int64_t id : ids) {
      const auto times = std::count(dropped.begin(), dropped.end(), id);
      CHECK(counts[id] < 4 || times == std::count(ids.begin(), ids.end(), id));
    }
    for (const uint32_t count : one.counts) CHECK(count >= 4);
  }
  CHECK(one.admission->halves(0) && !one.admission->halves(81));
  one.admission->halve();
  CHECK(one.admission->halves(20) && !one.admission->halves(21));
  AdmissionCase other({{"sketch", {{"threshold", 4}, {"bytes", 400}}}});
  CHECK(other.admission->set_states({one.admission->state()}));
  CHECK(other.admission->state() == one.admission->state() && !other.admission->halves(0));
  refuses("sketch", {{"threshold", 4}});
  refuses("sketch", {{"threshold", 4}, {"bytes", 400}, {"alpha", 0}});
  refuses("sketch", {{"threshold", 4}, {"bytes", 400}, {"depth", 0}});
  return check_result();
}
