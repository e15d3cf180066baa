// Numbering of the distinct rows of a batch in the order of their first lookups.
#pragma once

#include <cstring>

#include "torch_npu_ext/engine/plan/scan.h"

namespace rec_sdk {

// Numbers the rows of a share in the order of their first lookups. The destructor stores their count in the
// share, also after an exception.
class Numbering {
 public:
  Numbering(uint64_t* stamps, uint32_t epoch, UniqueRow* unique, uint32_t* last_batch, Share* share)
      : stamps_(stamps),
        epoch_(static_cast<uint64_t>(epoch) << 32),
        unique_(unique),
        last_batch_(last_batch),
        share_(share),
        next_(static_cast<uint64_t>(share->end())) {}
  ~Numbering() { share_->uniques = static_cast<int64_t>(next_) - share_->first; }

  // Returns the number of the row. There is no branch on whether the row already has a number, because on
  // batches of uniformly distributed ids half of its predictions would be wrong.
  REC_SDK_ALWAYS_INLINE uint32_t number(RowKey key) {
    const uint64_t stamp = stamps_[key];
    // The high half of the stamp: GCC takes two instructions for a shift, and one for another load.
    std::memcpy(&last_batch_[next_], reinterpret_cast<const char*>(&stamps_[key]) + sizeof(uint32_t),
                sizeof(uint32_t));
    const bool repeated = stamp >= epoch_;  // no stamp is of a later batch
    const uint64_t after = repeated ? stamp : epoch_ + next_;
    const uint32_t row = static_cast<uint32_t>(after);
    stamps_[key] = after;
    // If this row is not new, the next row overwrites these two entries.
    const uint64_t first_use = key;  // the key, and behind it a count of 0
    std::memcpy(&unique_[next_], &first_use, sizeof(UniqueRow));
    prefetch(&unique_[row]);
    next_ += !repeated;
    return row;
  }
  REC_SDK_ALWAYS_INLINE void tally(uint32_t row) { ++unique_[row].count; }
  REC_SDK_ALWAYS_INLINE const void* stamp(RowKey key) const { return &stamps_[key]; }

 private:
  static_assert(sizeof(UniqueRow) == sizeof(uint64_t) && __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__,
                "number() writes both members in one store");

  uint64_t* stamps_;
  uint64_t epoch_;
  UniqueRow* unique_;
  uint32_t* last_batch_;
  Share* share_;
  uint64_t next_;
};

}  // namespace rec_sdk
