// The division of rows among cores: equal shares of the bytes to move, cut between rows.
#pragma once

#include "op_kernels/common/ascendc/hot_rows.h"
#include "op_kernels/common/ascendc/sorted_search.h"

namespace rec_sdk {
namespace ascendc {

class RowSplit {
 public:
  static constexpr uint32_t kBytes = SortedSearch<64>::kBytes;

  // record_bytes: bytes read and written per row.
  __aicore__ inline void init(TPipe* pipe, const Segments& segments, const HotWorkspace& workspace,
                              int64_t record_bytes) {
    segments_ = segments;
    hot_.init(segments, workspace);
    search_.init(pipe);
    row_cost_ = 2 * record_bytes + 8;
    lookup_cost_ = segments.dim * 4 + lookup_arrays(segments.lookups) * 4;
    // For a chunk, its sum is read instead of its lookups.
    chunk_cost_ = segments.dim * 4 - kChunk * lookup_cost_;
    chunks_ = hot_.chunks();
  }

  __aicore__ inline Share rows_of_core() {
    const int64_t cores = AscendC::GetBlockNum(), core = AscendC::GetBlockIdx();
    const int64_t total = cost(segments_.rows, segments_.lookups.count, chunks_);
    const int64_t wanted[kEnds] = {total / cores * core, total / cores * (core + 1)};
    Interval in[kEnds] = {{0, segments_.rows, 0}, {0, segments_.rows, 0}};
    narrow(wanted, in);
    const SearchedArray<int32_t> offsets[kEnds] = {offsets_of(in[0]), offsets_of(in[1])};
    FoundPlace<int32_t, 1> rows[kEnds];
    search_.find(offsets, RowBelow{*this, wanted, in}, rows);
    return {core == 0 ? 0 : rows[0].place, core == cores - 1 ? segments_.rows : rows[1].place};
  }

 private:
  static constexpr int64_t kEnds = SortedSearch<64>::kTargets;

  // Returns the cost of the rows before `row`, which have `lookups` lookups and `chunks` chunks; it never
  // decreases.
  __aicore__ inline int64_t cost(int64_t row, int64_t lookups, int64_t chunks) const {
    return row * row_cost_ + lookups * lookup_cost_ + chunks * chunk_cost_;
  }

  // An interval [low, high] of rows that contains the first row of a share, with the chunks before all of
  // them except `low`.
  struct Interval {
    int64_t low, high, chunks;
  };

  __aicore__ inline SearchedArray<int32_t> offsets_of(const Interval& in) const {
    return {segments_.offsets, segments_.rows + 1, in.low, in.high};
  }

  // Returns whether a row lies before an end of the share. No hot row may lie between it and the start of its
  // interval.
  struct RowBelow {
    const RowSplit& split;
    const int64_t (&wanted)[kEnds];
    const Interval (&in)[kEnds];
    template <class Values>
    __aicore__ inline bool operator()(int64_t t, int64_t row, const Values& offset) const {
      return split.cost(row, offset.get(0), in[t].chunks) < wanted[t];
    }
  };
  // Returns whether a hot row lies before an end of the share.
  struct HotRowBelow {
    const RowSplit& split;
    const int64_t (&wanted)[kEnds];
    template <class Values>
    __aicore__ inline bool operator()(int64_t t, int64_t, const Values& hot) const {
      return split.cost(hot.get(kRow), hot.get(kLookup), hot.get(kChunksBefore)) < wanted[t];
    }
  };

  // Narrows both intervals until no hot row lies inside them.
  __aicore__ inline void narrow(const int64_t (&wanted)[kEnds], Interval (&in)[kEnds]) {
    if (hot_.count() == 0) return;
    const SearchedArray<int32_t> all = {hot_.words(), hot_.count(), 0, hot_.count()};
    const SearchedArray<int32_t> lists[kEnds] = {all, all};
    FoundPlace<int32_t, kHotFields> hot[kEnds];
    search_.find(lists, HotRowBelow{*this, wanted}, hot);
    for (int64_t t = 0; t < kEnds; ++t) {
      if (hot[t].place < all.size) in[t].high = hot[t].here[kRow];
      if (hot[t].place == 0) continue;
      in[t].low = hot[t].before[kRow] + 1;
      in[t].chunks = hot[t].before[kChunksBefore] + hot[t].before[kRowChunks];
    }
  }

  Segments segments_;
  HotSegments hot_;
  SortedSearch<64> search_;
  int64_t row_cost_, lookup_cost_, chunk_cost_, chunks_;
};

}  // namespace ascendc
}  // namespace rec_sdk
