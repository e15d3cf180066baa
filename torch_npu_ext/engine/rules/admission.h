// The admission of ids: which ids of a batch get rows. Admission is decided per batch: all lookups of ids
// without a row are counted before the first of them is decided, and count() stores for each lookup where
// accept() finds its count.
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "torch_npu_ext/engine/batch/batch.h"
#include "torch_npu_ext/engine/batch/plan_buffers.h"
#include "torch_npu_ext/engine/rules/rule.h"

namespace rec_sdk {

// A lookup of an id without a slot.
struct UnknownLookup {
  static constexpr int64_t kKnown = -1;
  int64_t id;
  int64_t place;  // kKnown if the id has a row; otherwise the position of its count in the table's admission
  uint32_t lookup;  // index in the batch
  bool known() const { return place == kKnown; }
};

// Counts the lookups of ids without a row, and decides which ids get one. This base class admits every id.
// Planning calls each function once per table or piece of a batch, so no lookup costs a virtual call.
class Admission {
 public:
  explicit Admission(bool wide = false) : candidates(wide) {}
  virtual ~Admission() = default;

  // Counts the lookups of a piece, from lookups[first] on, in order, and sets the positions of all that are
  // not known, which are valid until admit(). Throws MemoryLimitError and std::bad_alloc; the log contains
  // what it changed.
  virtual void count(const Batch& /*batch*/, const Batch::Piece& /*piece*/, const TableClock& /*clock*/,
                     size_t /*first*/, std::vector<UnknownLookup>* /*lookups*/, LifecycleLog* /*log*/) {}
  // Moves the lookups of ids that have or get a row to the front, in order, and returns their number. Writes
  // `slot` to `local` for every lookup.
  virtual size_t accept(const LifecycleLog& /*log*/, uint32_t /*slot*/, std::vector<UnknownLookup>* lookups,
                        uint32_t* /*local*/) const noexcept {
    return lookups->size();
  }
  // Called when the ids of log->admitted have rows: fills in their counts, and removes them from the
  // candidates.
  virtual void admit(LifecycleLog* /*log*/) noexcept {}
  // Restores the state before the batch.
  virtual void undo(const LifecycleLog& /*log*/) noexcept {}

  // Returns whether admit() fills in exact counts, as is the case if every id is counted separately.
  virtual bool counts_each() const { return false; }
  virtual double worth(const Candidates::Values& /*values*/) const { return 0; }
  // Replaces the candidates; returns false if nothing is counted.
  virtual bool set_candidates(const std::vector<LifecycleLog::Counted>& /*wanted*/) { return false; }
  virtual int64_t bytes() const { return candidates.bytes(); }
  virtual void clear() { candidates.clear(); }

  // Returns whether the counts are due for halving at the end of a step; `planned` lookups of plans that are
  // not started are subtracted.
  virtual bool halves(int64_t /*planned*/) const { return false; }
  virtual void halve() noexcept {}
  // The state of counts other than candidates, for a save, and its restoration from saved states. Empty, and
  // false, without such counts.
  virtual std::vector<uint8_t> state() const { return {}; }
  virtual bool set_states(const std::vector<std::vector<uint8_t>>& /*states*/) { return false; }

  Candidates candidates;  // empty unless every id is counted separately
};

// The parameters of a table's admission. If `wide`, candidates have clicks and timestamps.
struct AdmissionTable {
  std::string name;
  uint64_t seed;
  bool wide;
  MemoryGuard* memory;
};

// A rule that creates the admission of a table.
class AdmissionRule final : public Rule {
 public:
  // Creates the admission of a table; throws MemoryLimitError.
  using Make = std::function<std::unique_ptr<Admission>(const AdmissionTable& table)>;
  explicit AdmissionRule(Make make_admission, bool clicks = false)
      : make(std::move(make_admission)), clicks_(clicks) {}

  bool needs_clicks() const override { return clicks_; }
  const Make make;

 private:
  bool clicks_;
};

// Calls prepare(lookup), and kCountDistance lookups later count(lookup), for lookups in [begin, end) of ids
// without a row.
constexpr int64_t kCountDistance = 16;
template <class Prepare, class Count>
REC_SDK_ALWAYS_INLINE void for_each_unknown(UnknownLookup* begin, UnknownLookup* end, const Prepare& prepare,
                                            const Count& count) {
  const auto prepare_if = [&](UnknownLookup* one) __attribute__((always_inline)) {
    if (!one->known()) prepare(one);
  };
  for (UnknownLookup* one = begin; one < end && one < begin + kCountDistance; ++one) prepare_if(one);
  for (UnknownLookup* one = begin; one < end; ++one) {
    if (end - one > kCountDistance) prepare_if(one + kCountDistance);
    if (!one->known()) count(one);
  }
}

// Implements Admission::accept() with fetch(lookup), which prefetches, and admits(lookup), for ids without a
// row. All lookups are decided before any id is added, so that the processor overlaps their cache misses.
template <class Fetch, class Admits>
REC_SDK_ALWAYS_INLINE size_t accept_if(uint32_t slot, std::vector<UnknownLookup>* lookups, uint32_t* local,
                                       const Fetch& fetch, const Admits& admits) {
  constexpr size_t kFetchDistance = 16;
  UnknownLookup* const all = lookups->data();
  const size_t count = lookups->size();
  size_t accepted = 0;
  for (size_t i = 0; i < count; ++i) {
    if (i + kFetchDistance < count && !all[i + kFetchDistance].known()) fetch(all[i + kFetchDistance]);
    const UnknownLookup one = all[i];
    local[one.lookup] = slot;  // overwritten later for accepted lookups
    all[accepted] = one;
    accepted += one.known() || admits(one);
  }
  return accepted;
}

}  // namespace rec_sdk
