// Which rows a core owns: equal shares of the bytes to move, cut between rows.
#pragma once

#include "op_kernels/common/ascendc/hot_rows.h"

namespace rec_sdk {
namespace ascendc {

class RowSplit {
 public:
  // record_bytes: of a row, read and written.
  __aicore__ inline void init(TPipe* pipe, const Segments& segments, const HotWorkspace& workspace,
                              int64_t record_bytes) {
    segments_ = segments;
    parts_.init(pipe, workspace);
    const Lookups& lookups = segments.lookups;
    const int64_t index_bytes =
        4 + (lookups.grad_column != nullptr ? 4 : 0) + (lookups.scale != nullptr ? 4 : 0);
    row_cost_ = 2 * record_bytes + 8;
    lookup_cost_ = segments.dim * 4 + index_bytes;
    // A chunk's sum is read instead of its lookups.
    chunk_cost_ = segments.dim * 4 - kChunk * lookup_cost_;
    chunks_ = 0;
    for (int64_t p = 0; p < parts_.count(); ++p) chunks_ += parts_.get(p, kChunks);
  }

  __aicore__ inline Share rows_of_core() {
    const int64_t cores = AscendC::GetBlockNum(), core = AscendC::GetBlockIdx();
    const int64_t total = cost(segments_.rows, segments_.lookups.count, chunks_);
    return {core == 0 ? 0 : first_row(total / cores * core),
            core == cores - 1 ? segments_.rows : first_row(total / cores * (core + 1))};
  }

 private:
  // Of the rows before `row`, which have `lookups` lookups and `chunks` chunks; it never decreases.
  __aicore__ inline int64_t cost(int64_t row, int64_t lookups, int64_t chunks) const {
    return row * row_cost_ + lookups * lookup_cost_ + chunks * chunk_cost_;
  }

  // Rows [low, high] between which the first row lies, with the chunks before all of them but `low`.
  struct Interval {
    int64_t low, high, chunks;
  };

  // The first row with at least that cost before it.
  __aicore__ inline int64_t first_row(int64_t wanted) {
    Interval in{0, segments_.rows, 0};
    narrow(wanted, &in);
    while (in.low < in.high) {
      const int64_t middle = (in.low + in.high) / 2;
      const int64_t lookups =
          global(segments_.offsets, segments_.rows + 1).GetValue(static_cast<uint64_t>(middle));
      if (cost(middle, lookups, in.chunks) < wanted) {
        in.low = middle + 1;
      } else {
        in.high = middle;
      }
    }
    return in.low;
  }

  // To an interval without a hot row inside: between parts, then between the hot rows of the part.
  __aicore__ inline void narrow(int64_t wanted, Interval* in) {
    int64_t part = 0;
    for (int64_t p = 1; p < parts_.count(); ++p) {
      const int64_t chunks = in->chunks + parts_.get(p - 1, kChunks);
      const int64_t row = parts_.get(p, kFirstRow);
      if (cost(row, parts_.get(p, kFirstLookup), chunks) >= wanted) {
        in->high = row;
        break;
      }
      *in = {row, segments_.rows, chunks};
      part = p;
    }
    if (parts_.count() > 0) narrow_between_hot_rows(wanted, part, in);
  }

  __aicore__ inline void narrow_between_hot_rows(int64_t wanted, int64_t part, Interval* in) {
    const int64_t chunks_before_part = in->chunks;
    int64_t low = 0, high = parts_.get(part, kHotRows);
    while (low < high) {
      const int64_t middle = (low + high) / 2;
      const int64_t row = parts_.entry(part, middle, kRow);
      const int64_t chunks = chunks_before_part + parts_.entry(part, middle, kChunksBefore);
      if (cost(row, parts_.entry(part, middle, kLookup), chunks) < wanted) {
        in->low = row + 1;
        in->chunks = chunks + parts_.entry(part, middle, kRowChunks);
        low = middle + 1;
      } else {
        in->high = row;
        high = middle;
      }
    }
  }

  Segments segments_;
  HotParts parts_;
  int64_t row_cost_, lookup_cost_, chunk_cost_, chunks_;
};

}  // namespace ascendc
}  // namespace rec_sdk
