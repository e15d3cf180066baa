// Eviction by age: an id is evicted if its timestamp is more than `seconds` before the table's latest
// timestamp.
#include "torch_npu_ext/engine/rules/eviction_rule.h"

namespace rec_sdk {
namespace {

class Age final : public EvictionRule {
 public:
  explicit Age(RuleNumbers* numbers) : seconds_(numbers->whole("seconds", 1)) {}

  ColumnSet columns() const override { return {Column::kTimestamp}; }
  EvictReason reason() const override { return EvictReason::kAge; }
  void choose(const TableClock& clock, std::vector<Evictable>* ids) const override {
    choose_if(ids, [&](const Evictable& one) {
      const uint64_t age = static_cast<uint64_t>(clock.timestamp) - static_cast<uint64_t>(one.timestamp);
      return one.timestamp < clock.timestamp && age > static_cast<uint64_t>(seconds_);
    });
  }

 private:
  int64_t seconds_;
};

}  // namespace

std::unique_ptr<Rule> make_age_rule(RuleNumbers* numbers) { return std::make_unique<Age>(numbers); }

}  // namespace rec_sdk
