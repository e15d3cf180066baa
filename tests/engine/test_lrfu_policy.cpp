// LRFU against sums of uses that count less and less.
#include "tests/engine/policy_score.h"

using namespace policy_model;

int main() {
  compare("lrfu", [](int64_t slots, const Future&) { return std::make_unique<Score>(slots); });
  frequent_rows_stay("lrfu");
  return check_result();
}
