// Rules by which ids leave a table.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "torch_npu_ext/engine/directory/table_clock.h"
#include "torch_npu_ext/engine/rules/rule.h"

namespace rec_sdk {

// Saves have the numbers.
enum class EvictReason : uint8_t { kNone = 0, kAge = 1, kIdle = 2, kScore = 3, kBound = 4, kNorm = 6 };

// An id with a row, or a candidate. Rules go by no row number: those depend on what came and left before.
struct Evictable {
  int64_t id;
  double worth;        // the score, or how often it was seen
  int64_t timestamp;   // the latest
  uint32_t idle;       // batches since the last that had it
  bool held = false;   // it has to stay for now
  bool small = false;  // the caller has marked the row: the norm of its weight is too small
  EvictReason reason = EvictReason::kNone;
  bool leaves() const { return reason != EvictReason::kNone && !held; }
};

class EvictionRule : public Rule {
 public:
  virtual EvictReason reason() const = 0;
  // Gives ids that leave the reason, where they have none.
  virtual void choose(const TableClock& clock, std::vector<Evictable>* ids) const = 0;

  // Whether it goes by intervals of steps; otherwise it evicts at the end of each step after which it is due.
  virtual bool at_intervals() const { return true; }
  virtual bool due(int64_t /*rows*/, int64_t /*candidates*/) const { return false; }
  virtual bool evicts_candidates() const { return true; }
  // Whether it may evict every id: a clock that is wrong can empty a table.
  virtual bool takes_any_number() const { return true; }

 protected:
  template <class Leaves>  // leaves(Evictable)
  void choose_if(std::vector<Evictable>* ids, const Leaves& leaves) const {
    for (Evictable& one : *ids) {
      if (one.reason == EvictReason::kNone && leaves(one)) one.reason = reason();
    }
  }
  template <class Before>  // before(Evictable, Evictable): the first of these leaves first
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
