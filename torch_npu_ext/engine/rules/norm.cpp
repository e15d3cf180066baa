// An id leaves when the 2-norm of its weight is less. The caller measures, and marks such rows: Table::small.
#include "torch_npu_ext/engine/rules/eviction_rule.h"

namespace rec_sdk {
namespace {

class Norm final : public EvictionRule {
 public:
  explicit Norm(RuleNumbers* numbers) {
    numbers->check(numbers->real("least") > 0, "'least' must be above 0");
  }

  EvictReason reason() const override { return EvictReason::kNorm; }
  void choose(const TableClock&, std::vector<Evictable>* ids) const override {
    choose_if(ids, [](const Evictable& one) { return one.small; });
  }
};

}  // namespace

std::unique_ptr<Rule> make_norm_rule(RuleNumbers* numbers) { return std::make_unique<Norm>(numbers); }

}  // namespace rec_sdk
