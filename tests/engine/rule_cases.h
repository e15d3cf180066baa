// Helpers for tests of rules without an engine.
#pragma once

#include <algorithm>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "tests/engine/check.h"
#include "torch_npu_ext/engine/rules/rules.h"

namespace rec_sdk {

using Given = std::vector<std::pair<std::string, RuleNumbers::Values>>;

// Checks that a rule with these parameters is rejected.
inline void refuses(const std::string& rule, const RuleNumbers::Values& numbers) {
  CHECK_THROWS(Rules({{rule, numbers}}), std::invalid_argument);
}

// Returns the ids that the only eviction rule of `rules` chooses.
inline std::vector<int64_t> chosen(const Rules& rules, std::vector<Evictable> known, TableClock clock = {}) {
  CHECK(rules.evictions().size() == 1);
  const EvictionRule& rule = *rules.evictions()[0];
  rule.choose(clock, &known);
  std::vector<int64_t> ids;
  for (const Evictable& one : known) {
    if (one.reason == rule.reason()) ids.push_back(one.id);
  }
  return ids;
}

// The admission of a table, with a function that passes it batches of one feature.
class AdmissionCase {
 public:
  explicit AdmissionCase(const Given& given, const std::string& table = "t") : rules_(given) {
    const bool wide = rules_.needs_clicks() || rules_.needs_timestamps();
    admission = rules_.admission()->make({table, 5, wide, &memory_});
  }

  // Counts a batch and returns the ids of the lookups that get rows, in order. If `dropped`, the batch is
  // undone.
  std::vector<int64_t> admitted(const std::vector<int64_t>& ids, bool dropped = false,
                                const std::vector<int32_t>& clicks = {}) {
    const int64_t count = static_cast<int64_t>(ids.size());
    const Batch::Piece piece{0, 0, 0, count, 0, 0, 1};
    Batch batch;
    batch.clicks = clicks.empty() ? nullptr : clicks.data();
    std::vector<UnknownLookup> lookups;
    for (const int64_t id : ids) lookups.push_back({id, 0, static_cast<uint32_t>(lookups.size())});
    std::vector<uint32_t> local(ids.size());
    LifecycleLog log;
    ++clock.batches;
    admission->count(batch, piece, clock, 0, &lookups, &log);
    lookups.resize(admission->accept(log, 77, &lookups, local.data()));
    CHECK(local == std::vector<uint32_t>(ids.size(), 77));
    std::vector<int64_t> found;
    for (const UnknownLookup& one : lookups) {
      const bool first = std::find(found.begin(), found.end(), one.id) == found.end();
      if (first) log.admitted.push_back({one.id, 0, one.place, {}});
      found.push_back(one.id);
    }
    admission->admit(&log);
    counts.clear();
    for (const LifecycleLog::Admitted& one : log.admitted) counts.push_back(one.values.count);
    if (dropped) {
      admission->undo(log);
      --clock.batches;
    }
    return found;
  }

  std::unique_ptr<Admission> admission;
  TableClock clock;
  std::vector<uint32_t> counts;  // counts of the ids that the last batch admitted

 private:
  Rules rules_;
  MemoryGuard memory_;
};

}  // namespace rec_sdk
