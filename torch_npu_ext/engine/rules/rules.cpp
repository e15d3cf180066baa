#include "torch_npu_ext/engine/rules/rules.h"

#include <algorithm>
#include <stdexcept>

namespace rec_sdk {

// Each rule is one file, `<name>.cpp`, which defines make_<name>_rule(), and one line in this list. If
// several rules evict an id, the first of them in this list is recorded as the reason.
#define REC_SDK_RULES(RULE) \
  RULE(count)               \
  RULE(showclick)           \
  RULE(sketch)              \
  RULE(probability)         \
  RULE(score)               \
  RULE(age)                 \
  RULE(idle)                \
  RULE(norm)                \
  RULE(share)               \
  RULE(rows)

#define REC_SDK_DECLARE(name) std::unique_ptr<Rule> make_##name##_rule(RuleNumbers* numbers);
REC_SDK_RULES(REC_SDK_DECLARE)

namespace {

struct Registered {
  const char* name;
  std::unique_ptr<Rule> (*make)(RuleNumbers* numbers);
};
#define REC_SDK_REGISTER(name) {#name, make_##name##_rule},
constexpr Registered kRules[] = {REC_SDK_RULES(REC_SDK_REGISTER)};

void check(bool valid, const std::string& message) {
  if (!valid) throw std::invalid_argument(message);
}

}  // namespace

std::vector<std::string> rule_names() {
  std::vector<std::string> names;
  for (const Registered& rule : kRules) names.emplace_back(rule.name);
  return names;
}

Rules::Rules(const std::vector<std::pair<std::string, RuleNumbers::Values>>& rules) {
  std::string known;
  for (const Registered& registered : kRules) {
    known += std::string(known.empty() ? "'" : ", '") + registered.name + "'";
    for (const auto& [name, values] : rules) {
      if (name != registered.name) continue;
      RuleNumbers numbers(name, values);
      add(registered.make(&numbers));
      numbers.check_names();
    }
  }
  for (const auto& [name, values] : rules) {
    const auto same = [&name = name](const auto& other) { return other.first == name; };
    check(known.find("'" + name + "'") != std::string::npos,
          "rule '" + name + "' is not known; use one of " + known);
    check(std::count_if(rules.begin(), rules.end(), same) == 1, "rule '" + name + "' is given twice");
  }
  check(score_ != nullptr || !columns_.has(Column::kScore), "rule 'share' needs the rule 'score'");
}

void Rules::add(std::shared_ptr<const Rule> rule) {
  if (const auto* const admission = dynamic_cast<const AdmissionRule*>(rule.get())) {
    check(admission_ == nullptr, "a table can have only one admission rule");
    admission_ = admission;
  } else if (const auto* const eviction = dynamic_cast<const EvictionRule*>(rule.get())) {
    evictions_.push_back(eviction);
    (eviction->at_intervals() ? at_intervals_ : bound_) = true;
  } else {
    score_ = dynamic_cast<const ScoreRule*>(rule.get());
  }
  columns_.add(rule->columns());
  clicks_ |= rule->needs_clicks();
  all_.push_back(std::move(rule));
}

bool Rules::evicts_by(EvictReason reason) const {
  const auto by = [reason](const EvictionRule* rule) { return rule->reason() == reason; };
  return std::any_of(evictions_.begin(), evictions_.end(), by);
}

}  // namespace rec_sdk
