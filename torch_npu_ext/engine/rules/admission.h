// The admission of ids, which decides which ids of a batch get rows. The lookups of all ids without a row are
// counted before any id is decided. count() stores in each lookup the position of its count, which accept()
// then reads.
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
  int64_t place;    // kKnown if the id has a row; otherwise the position of its count
  uint32_t lookup;  // index of the lookup in the batch
  bool known() const { return place == kKnown; }
};

// Counts the lookups of ids without a row, and decides which of the ids get one. This base class admits every
// id. Each function is called once per table or piece of a batch, so there is no virtual call per lookup.
class Admission {
 public:
  explicit Admission(bool wide = false) : candidates(wide) {}
  virtual ~Admission() = default;

  // Counts the lookups of a piece, which begin at lookups[first], in order. Sets `place` of each lookup whose
  // id has no row; these positions are valid until admit(). Throws MemoryLimitError and std::bad_alloc, after
  // which undo() with the log restores the former state.
  virtual void count(const Batch& /*batch*/, const Batch::Piece& /*piece*/, const TableClock& /*clock*/,
                     size_t /*first*/, std::vector<UnknownLookup>* /*lookups*/, LifecycleLog* /*log*/) {}
  // Moves the lookups of ids that have or get a row to the front of `lookups`, in order, and returns their
  // number. Writes `slot`, the default slot, to the entries of all lookups in `local`.
  virtual size_t accept(const LifecycleLog& /*log*/, uint32_t /*slot*/, std::vector<UnknownLookup>* lookups,
                        uint32_t* /*local*/) const noexcept {
    return lookups->size();
  }
  // Called after the ids of log->admitted got rows: writes their counts to the log, and removes the ids from
  // the candidates.
  virtual void admit(LifecycleLog* /*log*/) noexcept {}
  // Restores the state before the batch that wrote the log.
  virtual void undo(const LifecycleLog& /*log*/) noexcept {}

  // Returns whether the counts that admit() writes are exact, because every id is counted separately.
  virtual bool counts_each() const { return false; }
  virtual double worth(const Candidates::Values& /*values*/) const { return 0; }
  // Replaces the candidates and their counts; returns false if the admission does not count.
  virtual bool set_candidates(const std::vector<LifecycleLog::Counted>& /*wanted*/) { return false; }
  virtual int64_t bytes() const { return candidates.bytes(); }
  virtual void clear() { candidates.clear(); }

  // Returns whether the counts must be halved at the end of a step. The `planned` lookups, of plans that are
  // not started, do not count.
  virtual bool halves(int64_t /*planned*/) const { return false; }
  virtual void halve() noexcept {}
  // state() returns counts other than the candidates, for a save, and set_states() restores them from saved
  // states. Without such counts they return an empty vector and false.
  virtual std::vector<uint8_t> state() const { return {}; }
  virtual bool set_states(const std::vector<std::vector<uint8_t>>& /*states*/) { return false; }

  Candidates candidates;  // empty unless every id is counted separately
};

// The parameters of the admission of a table. If `wide`, candidates also have clicks and timestamps.
struct AdmissionTable {
  std::string name;
  uint64_t seed;
  bool wide;
  MemoryGuard* memory;
};

// An admission rule, which creates the admission of a table.
class AdmissionRule final : public Rule {
 public:
  // A function that creates the admission of a table; it throws MemoryLimitError.
  using Make = std::function<std::unique_ptr<Admission>(const AdmissionTable& table)>;
  explicit AdmissionRule(Make make_admission, bool clicks = false)
      : make(std::move(make_admission)), clicks_(clicks) {}

  bool needs_clicks() const override { return clicks_; }
  const Make make;

 private:
  bool clicks_;
};

// Calls prepare(lookup) and later count(lookup) for the lookups in [begin, end) whose ids have no row.
// prepare() runs kCountDistance lookups ahead, for prefetches.
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

// Implements Admission::accept(). For ids without a row, fetch(lookup) prefetches the count and
// admits(lookup) returns whether the id is admitted. All lookups are decided before any id is added, so that
// the processor overlaps their cache misses.
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
    local[one.lookup] = slot;  // for accepted lookups, this is overwritten later
    all[accepted] = one;
    accepted += one.known() || admits(one);
  }
  return accepted;
}

}  // namespace rec_sdk
