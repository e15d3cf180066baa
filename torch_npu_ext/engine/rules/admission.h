// Which ids of a batch get rows. All lookups of a batch decide together: those of an id without a row are
// counted before any of them is answered. The count keeps what it found of an id for the answer.
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
  int64_t place;  // kKnown: the id has a row. Otherwise where the table's admission has what it counts of it
  uint32_t lookup;  // counted from the first of the batch
  bool known() const { return place == kKnown; }
};

// The counts that a table keeps of ids without a row, and the choice of those that get one. This class admits
// every id. A plan calls each function once for a table, or for a piece of the batch: no lookup costs a
// virtual call.
class Admission {
 public:
  explicit Admission(bool wide = false) : candidates(wide) {}
  virtual ~Admission() = default;

  // Counts lookups of a piece, those from `first` on, in order, and finds the places of all that are not
  // known: these are valid until admit(). Throws MemoryLimitError and std::bad_alloc; what it did is in the
  // log.
  virtual void count(const Batch& /*batch*/, const Batch::Piece& /*piece*/, const TableClock& /*clock*/,
                     size_t /*first*/, std::vector<UnknownLookup>* /*lookups*/, LifecycleLog* /*log*/) {}
  // Moves lookups of ids that have or get a row to the front, in order, and returns how many. Writes `slot`
  // into `local` for every lookup.
  virtual size_t accept(const LifecycleLog& /*log*/, uint32_t /*slot*/, std::vector<UnknownLookup>* lookups,
                        uint32_t* /*local*/) const noexcept {
    return lookups->size();
  }
  // The ids of log->admitted have rows now: fills what was counted of them, which are no candidates any more.
  virtual void admit(LifecycleLog* /*log*/) noexcept {}
  // All is as before the batch.
  virtual void undo(const LifecycleLog& /*log*/) noexcept {}

  // Whether admit() says all that is known of an id, as it does where each has its own place.
  virtual bool counts_each() const { return false; }
  virtual double worth(const Candidates::Values& /*values*/) const { return 0; }
  // The candidates are these; false if it counts nothing.
  virtual bool set_candidates(const std::vector<LifecycleLog::Counted>& /*wanted*/) { return false; }
  virtual int64_t bytes() const { return candidates.bytes(); }
  virtual void clear() { candidates.clear(); }

  // At the end of a step: whether what it has counted, without lookups of plans that have not begun, is due
  // to be halved.
  virtual bool halves(int64_t /*planned*/) const { return false; }
  virtual void halve() noexcept {}
  // The counts beside candidates, for a save, and those of others, which it takes over. Empty, and false,
  // where it has none.
  virtual std::vector<uint8_t> state() const { return {}; }
  virtual bool set_states(const std::vector<std::vector<uint8_t>>& /*states*/) { return false; }

  Candidates candidates;  // none where ids have no places of their own
};

// The table of an admission. With `wide` candidates have clicks and timestamps.
struct AdmissionTable {
  std::string name;
  uint64_t seed;
  bool wide;
  MemoryGuard* memory;
};

class AdmissionRule final : public Rule {
 public:
  // Makes the admission of a table; throws MemoryLimitError.
  using Make = std::function<std::unique_ptr<Admission>(const AdmissionTable& table)>;
  explicit AdmissionRule(Make make_admission, bool clicks = false)
      : make(std::move(make_admission)), clicks_(clicks) {}

  bool needs_clicks() const override { return clicks_; }
  const Make make;

 private:
  bool clicks_;
};

// prepare(lookup), and later count(lookup), of those in [begin, end) that are not known.
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

// Admission::accept() by ask(lookup), which prefetches, and later admits(lookup), of those that are not
// known. All are asked before any id is added, so that the processor looks ahead across lookups.
template <class Ask, class Admits>
REC_SDK_ALWAYS_INLINE size_t accept_if(uint32_t slot, std::vector<UnknownLookup>* lookups, uint32_t* local,
                                       const Ask& ask, const Admits& admits) {
  constexpr size_t kAskDistance = 16;
  UnknownLookup* const all = lookups->data();
  const size_t count = lookups->size();
  size_t accepted = 0;
  for (size_t i = 0; i < count; ++i) {
    if (i + kAskDistance < count && !all[i + kAskDistance].known()) ask(all[i + kAskDistance]);
    const UnknownLookup one = all[i];
    local[one.lookup] = slot;  // of the others too, for now
    all[accepted] = one;
    accepted += one.known() || admits(one);
  }
  return accepted;
}

}  // namespace rec_sdk
