// Eviction by a bound: if a step ends with more rows than the bound, the rows with the lowest scores or
// counts are evicted until 7/8 of the bound are left. The same bound applies to candidates, separately.
#include <tuple>

#include "torch_npu_ext/engine/rules/eviction_rule.h"

namespace rec_sdk {
namespace {

class Rows final : public EvictionRule {
 public:
  explicit Rows(RuleNumbers* numbers) : most_(numbers->whole("most", 1)) {}

  ColumnSet columns() const override { return {Column::kCount, Column::kLastUse}; }
  EvictReason reason() const override { return EvictReason::kBound; }
  bool at_intervals() const override { return false; }
  bool due(int64_t rows, int64_t candidates) const override { return rows > most_ || candidates > most_; }
  bool takes_any_number() const override { return false; }
  // Among ids with equal scores, the id that has been idle longest is evicted first.
  void choose(const TableClock&, std::vector<Evictable>* ids) const override {
    std::vector<Evictable*> free;
    int64_t kept = 0;
    for (Evictable& one : *ids) {
      if (one.chosen()) continue;
      ++kept;
      if (!one.held) free.push_back(&one);
    }
    if (kept <= most_) return;
    const int64_t count = std::min(kept - (most_ - most_ / 8), static_cast<int64_t>(free.size()));
    choose_first(std::move(free), count, [](const Evictable& a, const Evictable& b) {
      return std::make_tuple(a.worth, ~a.idle, a.id) < std::make_tuple(b.worth, ~b.idle, b.id);
    });
  }

 private:
  int64_t most_;
};

}  // namespace

std::unique_ptr<Rule> make_rows_rule(RuleNumbers* numbers) { return std::make_unique<Rows>(numbers); }

}  // namespace rec_sdk
