// Eviction by score, as in Rec SDK: the rows with the lowest scores are evicted. Their number is a fixed
// share of all rows, but at least one.
#include <tuple>

#include "torch_npu_ext/engine/rules/eviction_rule.h"

namespace rec_sdk {
namespace {

class Share final : public EvictionRule {
 public:
  explicit Share(RuleNumbers* numbers) : share_(numbers->real("share")) {
    numbers->check(share_ > 0 && share_ <= 1, "'share' must be above 0 and at most 1");
  }

  ColumnSet columns() const override { return {Column::kScore}; }
  EvictReason reason() const override { return EvictReason::kScore; }
  bool evicts_candidates() const override { return false; }
  bool takes_any_number() const override { return false; }
  // Among ids with equal scores, the lowest id is evicted first.
  void choose(const TableClock&, std::vector<Evictable>* ids) const override {
    std::vector<Evictable*> all;
    for (Evictable& one : *ids) all.push_back(&one);
    const int64_t count = static_cast<int64_t>(static_cast<double>(all.size()) * share_);
    choose_first(std::move(all), ids->empty() ? 0 : std::max<int64_t>(1, count),
                 [](const Evictable& a, const Evictable& b) {
                   return std::make_tuple(a.worth, a.id) < std::make_tuple(b.worth, b.id);
                 });
  }

 private:
  double share_;
};

}  // namespace

std::unique_ptr<Rule> make_share_rule(RuleNumbers* numbers) { return std::make_unique<Share>(numbers); }

}  // namespace rec_sdk
