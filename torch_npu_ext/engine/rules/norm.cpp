// Eviction by norm: an id is evicted if the 2-norm of its weights is below `least`. The caller computes the
// norms and marks the rows to evict in Table::small.
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
