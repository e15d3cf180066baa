// The interface of eviction rules.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "torch_npu_ext/engine/directory/table_clock.h"
#include "torch_npu_ext/engine/rules/rule.h"

namespace rec_sdk {

// The values are stored in saves and must not change.
enum class EvictReason : uint8_t { kNone = 0, kAge = 1, kIdle = 2, kScore = 3, kBound = 4, kNorm = 6 };

// An id as input of eviction rules: an id with a row, or a candidate. It has no row number, because rules
// must not depend on earlier insertions and evictions.
struct Evictable {
  int64_t id;
  double worth;        // the score of the id, or its number of lookups
  int64_t timestamp;   // the latest timestamp of the id
  uint32_t idle;       // batches since the last one that used the id
  bool held = false;   // must not be evicted now, because its row is pinned or has a sum in the window
  bool small = false;  // marked by the caller because the norm of its weights is too small
  EvictReason reason = EvictReason::kNone;
  bool chosen() const { return reason != EvictReason::kNone && !held; }
};

// An eviction rule, which chooses the ids to evict.
class EvictionRule : public Rule {
 public:
  virtual EvictReason reason() const = 0;
  // Sets `reason` of the ids that this rule evicts, unless another rule has already set it.
  virtual void choose(const TableClock& clock, std::vector<Evictable>* ids) const = 0;

  // Returns whether the rule runs at intervals of steps. Otherwise it runs at the end of every step for which
  // due() returns true.
  virtual bool at_intervals() const { return true; }
  virtual bool due(int64_t /*rows*/, int64_t /*candidates*/) const { return false; }
  virtual bool evicts_candidates() const { return true; }
  // Returns whether the rule may evict any number of ids, so that a wrong clock could empty the table.
  virtual bool takes_any_number() const { return true; }

 protected:
  template <class Evicts>  // evicts(id) returns whether the rule evicts it
  void choose_if(std::vector<Evictable>* ids, const Evicts& evicts) const {
    for (Evictable& one : *ids) {
      if (one.reason == EvictReason::kNone && evicts(one)) one.reason = reason();
    }
  }
  template <class Before>  // before(a, b) returns whether a is evicted before b
  void choose_first(std::vector<Evictable*> ids, int64_t count, const Before& before) const {
    if (count <= 0) return;
    std::nth_element(ids.begin(), ids.begin() + count - 1, ids.end(),
                     [&](const Evictable* a, const Evictable* b) { return before(*a, *b); });
    for (int64_t i = 0; i < count; ++i) {
      EvictReason& why = ids[static_cast<size_t>(i)]->reason;
      if (why == EvictReason::kNone) why = reason();
    }
  }
};

}  // namespace rec_sdk
