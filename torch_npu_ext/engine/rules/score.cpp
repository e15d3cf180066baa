#include "torch_npu_ext/engine/rules/score.h"

namespace rec_sdk {

ScoreRule::ScoreRule(RuleNumbers* numbers)
    : alpha_(numbers->real("alpha", 1.0)),
      beta_(numbers->real("beta", 0.0)),
      decay_(numbers->real("decay", 1.0)),
      decays_with_time_(numbers->whole("half_life", 0, 0) > 0),
      half_life_(numbers->whole("half_life", 0, 0)) {
  numbers->check(decay_ >= 0 && decay_ <= 1, "'decay' must be from 0 to 1");
  numbers->check(decay_ == 1 || !decays_with_time_,
                 "scores decay by 'decay' or by 'half_life': leave one out");
}

ColumnSet ScoreRule::columns() const {
  ColumnSet columns = {Column::kCount, Column::kScore};
  if (needs_clicks()) columns.add(Column::kClicks);
  if (decays_with_time_) columns.add(Column::kLastUse);
  return columns;
}

std::unique_ptr<Rule> make_score_rule(RuleNumbers* numbers) { return std::make_unique<ScoreRule>(numbers); }

}  // namespace rec_sdk
