// The score of each row, for rules that evict the rows with the lowest scores.
#pragma once

#include <cstdint>

#include "torch_npu_ext/engine/directory/half_life.h"
#include "torch_npu_ext/engine/directory/table_clock.h"
#include "torch_npu_ext/engine/rules/rule.h"

namespace rec_sdk {

// Sums over lookups of a row.
struct Counts {
  uint32_t shows = 0, clicks = 0;
};

// The rule that maintains scores. Each batch that contains a row adds alpha * shows + beta * clicks to its
// score, and former scores decay. Either the score becomes (score + total) * decay in each such batch, where
// `total` are the sums since the row was added; or scores halve every `half_life` batches of the table.
class ScoreRule final : public Rule {
 public:
  explicit ScoreRule(RuleNumbers* numbers);  // parameters "alpha", "beta", and "decay" or "half_life"

  ColumnSet columns() const override;
  bool needs_clicks() const override { return beta_ != 0; }

  // A row's values before the batch; a count of 0 means that this is its first batch.
  struct Before {
    double score;
    uint32_t count, last_use;
  };
  // Returns the score after a batch. With a half-life, it is the decayed score plus the batch's own
  // contribution, which is passed separately because `total` saturates at 2^32 - 1. Otherwise the first batch
  // of a row does not decay.
  REC_SDK_ALWAYS_INLINE double after(const Before& before, const Counts& total, const Counts& of_batch,
                                     const TableClock& clock) const {
    if (decays_with_time_) {
      const double left = before.count == 0 ? 0 : now(before.score, clock.batches_since(before.last_use));
      return left + of(of_batch);
    }
    return before.count == 0 ? of(total) : (before.score + of(total)) * decay_;
  }
  // Returns the present score of a row that no batch used for `idle_for` batches.
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
