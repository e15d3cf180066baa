// Which ids of a batch get rows. All lookups of a batch decide together: those of an id without a row are
// counted before any of them is answered. The count keeps what it found of an id for the answer.
#pragma once

#include <cstdint>

#include "torch_npu_ext/engine/batch/batch.h"
#include "torch_npu_ext/engine/batch/plan_buffers.h"
#include "torch_npu_ext/engine/group/table.h"

namespace rec_sdk {

// A lookup of an id that may be unknown to the table.
struct UnknownLookup {
  static constexpr int64_t kKnown = -1;
  int64_t id;
  int64_t candidate;  // its place among the candidates; kKnown: the id has a row
  uint32_t lookup;    // counted from the first of the batch
};

// Counts lookups of a piece, in order, and fills their `candidate`: a place until candidates.bytes() changes.
// Throws MemoryLimitError and std::bad_alloc; what it did is in the log.
void count_candidates(Table* table, const Batch& batch, const Batch::Piece& piece, UnknownLookup* begin,
                      UnknownLookup* end, LifeLog* log);

// Asks for the memory that admit() will read of a lookup.
REC_SDK_ALWAYS_INLINE void prefetch_admission(const Table& table, const UnknownLookup& unknown) {
  if (unknown.candidate == UnknownLookup::kKnown) return;
  if (table.sketch.any()) table.sketch.prefetch(unknown.id);
  if (table.has_candidates()) table.candidates.prefetch_place(unknown.candidate);
}

// Whether a candidate gets a row. If so the log has what was counted of it, for the row that comes next; it
// stays among the candidates until remove_admitted().
bool admit(const Table& table, const UnknownLookup& candidate, LifeLog* log);
void remove_admitted(Table* table, const LifeLog& log) noexcept;

// Candidates are as before the batch.
void undo_candidates(Table* table, const LifeLog& log) noexcept;

}  // namespace rec_sdk
