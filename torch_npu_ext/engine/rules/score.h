// The score of each row, for rules that evict rows with the lowest ones.
#pragma once

#include <cstdint>

#include "torch_npu_ext/engine/directory/half_life.h"
#include "torch_npu_ext/engine/directory/table_clock.h"
#include "torch_npu_ext/engine/rules/rule.h"

namespace rec_sdk {

// Sums over lookups.
struct Counts {
  uint32_t shows = 0, clicks = 0;
};

// Each batch that has a row adds alpha * shows + beta * clicks to its score, and a decay makes former ones
// count less: either (score + total) * decay in each such batch, where `total` is of the row's whole life; or
// half of a score is left after `half_life` batches of the table.
class ScoreRule final : public Rule {
 public:
  explicit ScoreRule(RuleNumbers* numbers);  // of "alpha", "beta", and "decay" or "half_life"

  ColumnSet columns() const override;
  bool needs_clicks() const override { return beta_ != 0; }

  // A row as it was before the batch; a `count` of 0: no batch has had it.
  struct Before {
    double score;
    uint32_t count, last_use;
  };
  // A score that decays with time is of the moment of the row's last batch: the score then as far as it is
  // left, and that of the batch, which is no difference of `total`: counts end at 2^32 - 1. Another one is
  // not decayed the first time.
  REC_SDK_ALWAYS_INLINE double after(const Before& before, const Counts& total, const Counts& of_batch,
                                     const TableClock& clock) const {
    if (decays_with_time_) {
      const double left = before.count == 0 ? 0 : now(before.score, clock.batches_since(before.last_use));
      return left + of(of_batch);
    }
    return before.count == 0 ? of(total) : (before.score + of(total)) * decay_;
  }
  // A score of a row that no batch had for so long.
  double now(double score, uint32_t idle_for) const {
    return decays_with_time_ ? half_life_.decayed(score, idle_for) : score;
  }

 private:
  double of(const Counts& counts) const { return alpha_ * counts.shows + beta_ * counts.clicks; }

  double alpha_, beta_, decay_;
  bool decays_with_time_;
  HalfLife half_life_;
};

}  // namespace rec_sdk
