// The rules of one table.
#pragma once

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "torch_npu_ext/engine/rules/admission.h"
#include "torch_npu_ext/engine/rules/eviction_rule.h"
#include "torch_npu_ext/engine/rules/score.h"

namespace rec_sdk {

// The rules of admission and eviction of one table.
class Rules {
 public:
  Rules() = default;  // no rules: every id gets a row and keeps it
  // Creates rules by name. Throws std::invalid_argument for an unknown rule or parameter, an invalid value,
  // or rules that exclude each other.
  explicit Rules(const std::vector<std::pair<std::string, RuleNumbers::Values>>& rules);

  bool any() const { return !all_.empty(); }
  const AdmissionRule* admission() const { return admission_; }  // or null
  const ScoreRule* score() const { return score_; }              // or null
  // The eviction rules, in the order of the list in rules.cpp: if several rules evict an id, the first of
  // them is recorded as the reason.
  const std::vector<const EvictionRule*>& evictions() const { return evictions_; }
  bool evicts_by(EvictReason reason) const;
  bool evicts_at_intervals() const { return at_intervals_; }
  bool has_bound() const { return bound_; }       // whether a rule bounds the number of ids
  ColumnSet columns() const { return columns_; }  // the columns that the rules need for each row
  bool needs_clicks() const { return clicks_; }
  bool needs_timestamps() const { return columns_.has(Column::kTimestamp); }

 private:
  void add(std::shared_ptr<const Rule> rule);

  std::vector<std::shared_ptr<const Rule>> all_;  // owns the rules that the members below point to
  const AdmissionRule* admission_ = nullptr;
  const ScoreRule* score_ = nullptr;
  std::vector<const EvictionRule*> evictions_;
  ColumnSet columns_;
  bool clicks_ = false, at_intervals_ = false, bound_ = false;
};

std::vector<std::string> rule_names();

}  // namespace rec_sdk
