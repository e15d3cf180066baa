// Hot rows have more than kChunk lookups and are listed in the segments. A separate launch sums their whole
// chunks on all cores before the rows are updated.
//
// sum_chunks      each core sums its share of all chunks
// update_rows     each core updates its share of the rows, measured in bytes to move
//
// The lookup numbers of a chunk contain exactly one multiple of kChunk, which determines the chunk's position
// in the workspace.
#pragma once

#include "op_kernels/common/ascendc/gradient_sums.h"

namespace rec_sdk {
namespace ascendc {

static_assert(kChunk == kHotLookups, "hot segments are cut into chunks of the segments' own size");

// With fewer lookups, an additional launch (5 to 20 us) takes longer than the sum of the longest possible
// row.
constexpr int64_t kLookupsWithoutChunks = 1024;

// The words of a HotSegment.
enum HotField { kRow, kLookup, kRowChunks, kChunksBefore, kHotFields };
static_assert(sizeof(HotSegment) == kHotFields * 4, "a field is a word");

struct HotWorkspace {
  float* sums;  // [places, pitch], or null if no rows are summed in chunks
  int64_t pitch;
};

__aicore__ inline int64_t first_place(int64_t lookup) { return ceil_div(lookup, kChunk); }

__aicore__ inline int64_t chunks_of(int64_t lookups, const HotWorkspace& workspace) {
  return workspace.sums != nullptr && lookups > kChunk ? quotient(lookups, kChunk) : 0;
}

// The hot segments that are summed in chunks: either all hot segments or none. The scalar unit reads the list
// directly from GM, because each core needs only a few entries.
class HotSegments {
 public:
  __aicore__ inline void init(const Segments& segments, const HotWorkspace& workspace) {
    words_ = reinterpret_cast<const int32_t*>(segments.hot_segments);
    count_ = workspace.sums != nullptr ? segments.hot_segment_count : 0;
  }
  __aicore__ inline int64_t count() const { return count_; }
  __aicore__ inline const int32_t* words() const { return words_; }  // [count, kHotFields]
  __aicore__ inline int64_t get(int64_t i, HotField field) const {
    return global(words_, count_ * kHotFields).GetValue(static_cast<uint64_t>(i * kHotFields + field));
  }
  __aicore__ inline int64_t chunks() const {
    return count_ > 0 ? get(count_ - 1, kChunksBefore) + get(count_ - 1, kRowChunks) : 0;
  }

 private:
  const int32_t* words_;
  int64_t count_;
};

}  // namespace ascendc
}  // namespace rec_sdk
