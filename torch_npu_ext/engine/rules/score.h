// The scores of rows, for rules that evict the rows with the lowest scores.
#pragma once

#include <cstdint>

#include "torch_npu_ext/engine/directory/half_life.h"
#include "torch_npu_ext/engine/directory/table_clock.h"
#include "torch_npu_ext/engine/rules/rule.h"

namespace rec_sdk {

// Sums of the signals of a row's lookups.
struct Counts {
  uint32_t shows = 0, clicks = 0;
};

// The rule that maintains scores. The value of lookups is alpha * shows + beta * clicks. With `half_life`,
// each batch adds the value of its own lookups to the score of a row, and scores halve every `half_life`
// batches of the table. With `decay`, each batch that contains a row sets its score to (score + total) *
// decay, where `total` is the value of all lookups since the row was added.
class ScoreRule final : public Rule {
 public:
  explicit ScoreRule(RuleNumbers* numbers);  // parameters "alpha", "beta", and "decay" or "half_life"

  ColumnSet columns() const override;
  bool needs_clicks() const override { return beta_ != 0; }

  // The values of a row before a batch. A count of 0 means that the batch is the row's first.
  struct Before {
    double score;
    uint32_t count, last_use;
  };
  // Returns the score of a row after a batch. `total` includes `of_batch`, the counts of the batch alone,
  // which are passed separately because `total` saturates at 2^32 - 1. With `decay`, the first batch of a row
  // sets the score to `total` without decay.
  REC_SDK_ALWAYS_INLINE double after(const Before& before, const Counts& total, const Counts& of_batch,
                                     const TableClock& clock) const {
    if (decays_with_time_) {
      const double left = before.count == 0 ? 0 : now(before.score, clock.batches_since(before.last_use));
      return left + of(of_batch);
    }
    return before.count == 0 ? of(total) : (before.score + of(total)) * decay_;
  }
  // Returns the present score of a row that was not used by the latest `idle_for` batches.
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
