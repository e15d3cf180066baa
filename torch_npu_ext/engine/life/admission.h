// Which ids of a batch get rows. All lookups of a batch decide together: those of an id without a row are
// counted before any of them is answered. The count keeps what it found of an id for the answer.
#pragma once

#include <cstdint>

#include "torch_npu_ext/engine/batch/batch.h"
#include "torch_npu_ext/engine/batch/plan_buffers.h"
#include "torch_npu_ext/engine/group/table.h"

namespace rec_sdk {

// A lookup of an id without a slot.
struct UnknownLookup {
  static constexpr int64_t kKnown = -1;
  int64_t id;
  // kKnown: the id has a row. Otherwise by the rule of the table: its place among the candidates, that of the
  // first of its cells in the log of the sketch, or 1 for one whose coin admits it.
  int64_t candidate;
  uint32_t lookup;  // counted from the first of the batch
};

// Counts lookups of a piece, in order, of those that are not kKnown, and fills their `candidate`: a place is
// valid until candidates.moves() changes. Throws MemoryLimitError and std::bad_alloc; what it did is in the
// log.
void count_candidates(Table* table, const Batch& batch, const Batch::Piece& piece, UnknownLookup* begin,
                      UnknownLookup* end, LifeLog* log);

// Whether the ids of lookups get a row, and what was counted of them, once all lookups are counted. They stay
// among the candidates until remove_admitted().
class Admission {
 public:
  Admission(const Table& table, const LifeLog& log)
      : table_(&table),
        log_(&log),
        life_(table.spec().life),
        batches_(static_cast<uint32_t>(table.clock.batches)),
        has_candidates_(table.has_candidates()),
        sketches_(table.sketch.any()) {}

  // Asks for the memory that the others read of a lookup.
  REC_SDK_ALWAYS_INLINE void prefetch(const UnknownLookup& unknown) const {
    if (unknown.candidate == UnknownLookup::kKnown) return;
    if (has_candidates_) table_->candidates.prefetch_near(static_cast<uint64_t>(unknown.candidate));
    if (sketches_) table_->sketch.prefetch(cells(unknown));
  }
  // Preconditions of these: the lookup is not kKnown.
  REC_SDK_ALWAYS_INLINE Candidates::Values counted(const UnknownLookup& unknown) const {
    if (has_candidates_) return table_->candidates.get(unknown.candidate);
    return {sketches_ ? table_->sketch.estimate(cells(unknown)) : 0, batches_, 0, 0};
  }
  REC_SDK_ALWAYS_INLINE bool admits(const UnknownLookup& unknown) const {
    if (life_.probability > 0) return unknown.candidate != 0;
    const Candidates::Values values = counted(unknown);
    return life_.score(values.count, values.clicks) >= life_.threshold;
  }

 private:
  const uint64_t* cells(const UnknownLookup& unknown) const {
    return log_->sketch.cells.data() + unknown.candidate;
  }

  const Table* table_;
  const LifeLog* log_;
  LifeSpec life_;  // copies: what a plan writes could be these, for all that the compiler knows
  uint32_t batches_;
  bool has_candidates_, sketches_;
};

void remove_admitted(Table* table, const LifeLog& log) noexcept;

// Candidates are as before the batch.
void undo_candidates(Table* table, const LifeLog& log) noexcept;

}  // namespace rec_sdk
