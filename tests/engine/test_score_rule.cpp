// Scores of rows: what a batch adds, and what is left of former ones.
#include "tests/engine/rule_cases.h"

int main() {
  using namespace rec_sdk;
  LifeClock clock;
  clock.batches = 30;
  const Rules by_factor({{"score", {{"alpha", 2}, {"beta", 0.5}, {"decay", 0.75}}}});
  CHECK(by_factor.needs_clicks() &&
        by_factor.columns().has({Column::kCount, Column::kScore, Column::kClicks}));
  const ScoreRule& factor = *by_factor.score();
  CHECK(factor.after({0, 0, 0}, {3, 2}, {1, 0}, clock) == 7);  // the first time it does not decay
  CHECK(factor.after({7, 2, 9}, {3, 2}, {1, 0}, clock) == (7 + 7) * 0.75);
  CHECK(factor.now(7, 20) == 7);
  const Rules by_time({{"score", {{"half_life", 10}}}});
  CHECK(!by_time.needs_clicks() && by_time.columns().has({Column::kCount, Column::kScore, Column::kLastUse}));
  const ScoreRule& time = *by_time.score();
  CHECK(time.after({0, 0, 0}, {3, 2}, {1, 0}, clock) == 1);
  CHECK(time.after({8, 2, 10}, {3, 2}, {1, 0}, clock) == 8 * 0.25 + 1);
  CHECK(time.now(8, 10) == 4 && time.now(8, 0) == 8);
  refuses("score", {{"decay", 1.5}});
  refuses("score", {{"decay", 0.5}, {"half_life", 3}});
  refuses("score", {{"half_life", -1}});
  return check_result();
}
