// Eviction by idleness: an id is evicted if none of the latest `batches` batches used it.
#include "torch_npu_ext/engine/rules/eviction_rule.h"

namespace rec_sdk {
namespace {

class Idle final : public EvictionRule {
 public:
  explicit Idle(RuleNumbers* numbers) : batches_(numbers->whole("batches", 1)) {}

  ColumnSet columns() const override { return {Column::kLastUse}; }
  EvictReason reason() const override { return EvictReason::kIdle; }
  void choose(const TableClock&, std::vector<Evictable>* ids) const override {
    choose_if(ids, [&](const Evictable& one) { return one.idle >= batches_; });
  }

 private:
  int64_t batches_;
};

}  // namespace

std::unique_ptr<Rule> make_idle_rule(RuleNumbers* numbers) { return std::make_unique<Idle>(numbers); }

}  // namespace rec_sdk
