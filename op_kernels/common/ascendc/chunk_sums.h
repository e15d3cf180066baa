// The launch before the update, which sums the chunks of hot rows. The chunks are divided evenly among cores.
#pragma once

#include "op_kernels/common/ascendc/hot_rows.h"

namespace rec_sdk {
namespace ascendc {

class ChunkSums {
 public:
  __aicore__ inline void run(TPipe* pipe, const Segments& segments, const HotWorkspace& workspace) {
    dim_ = segments.dim;
    workspace_ = workspace;
    hot_.init(segments, workspace);
    const Share share = share_of_core(hot_.chunks());
    if (share.begin == share.end) return;
    plan(pipe, segments.lookups);
    for (int64_t i = first_hot(share.begin); i < hot_.count(); ++i) {
      const int64_t before = hot_.get(i, kChunksBefore);
      if (before >= share.end) break;
      hot_row(hot_.get(i, kLookup), maximum<int64_t>(share.begin - before, 0),
              minimum(share.end - before, hot_.get(i, kRowChunks)));
    }
    finish();
  }

 private:
  static constexpr int64_t kTileFloats = 8192, kMaxWidth = 2048, kMaxTileRows = 32;

  // The lookups of row r of a tile.
  struct TileTerms {
    int64_t first_lookup;
    __aicore__ inline Terms operator()(int64_t r) const {
      return {r, 0, 0, first_lookup + r * kChunk, kChunk};
    }
  };

  __aicore__ inline void plan(TPipe* pipe, const Lookups& lookups) {
    const int64_t tiles = ceil_div(dim_, kMaxWidth);
    width_ = align_up(ceil_div(dim_, tiles), kUbBlock / 4);
    tile_rows_ = minimum(kMaxTileRows, maximum<int64_t>(1, kTileFloats / width_));
    open_lookup_index(&index_, pipe, lookups, lookups.count);
    sums_.init(pipe, &index_, lookups, width_, sum_levels(kChunk), nullptr, 0);
    pipe->InitBuffer(tiles_, static_cast<uint32_t>(2 * tile_rows_ * width_ * 4));
    for (int h = 0; h < 2; ++h) {
      summed_[h].init(pipe);
      free_[h].init(pipe);
      free_[h].set();
    }
    half_ = 0;
  }

  __aicore__ inline void finish() {
    for (int h = 0; h < 2; ++h) free_[h].wait();
    sums_.finish();
    index_.finish();
  }

  // Returns the last hot row that begins at or before a chunk.
  __aicore__ inline int64_t first_hot(int64_t chunk) const {
    int64_t low = 0, high = hot_.count() - 1;
    while (low < high) {
      const int64_t middle = (low + high + 1) / 2;
      if (hot_.get(middle, kChunksBefore) <= chunk) {
        low = middle;
      } else {
        high = middle - 1;
      }
    }
    return low;
  }

  // Sums chunks [begin, end) of the row whose lookups begin at `lookup`.
  __aicore__ inline void hot_row(int64_t lookup, int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; i += tile_rows_) {
      const int64_t rows = minimum(tile_rows_, end - i);
      for (int64_t column = 0; column < dim_; column += width_) {
        tile(lookup + i * kChunk, first_place(lookup) + i, rows, column);
      }
    }
  }

  __aicore__ inline void tile(int64_t lookup, int64_t place, int64_t rows, int64_t column) {
    const LocalTensor<float> out = tiles_.Get<float>()[static_cast<uint32_t>(half_ * tile_rows_ * width_)];
    const int64_t width = minimum(width_, dim_ - column);
    free_[half_].wait();
    sums_.run(TileTerms{lookup}, rows, column, width, out);
    summed_[half_].order();
    float* to = workspace_.sums + place * workspace_.pitch + column;
    store_rows(to, out, rows, width, workspace_.pitch, width_);
    free_[half_].set();
    half_ = 1 - half_;
  }

  HotWorkspace workspace_;
  HotSegments hot_;
  LookupIndex index_;
  GradientSums sums_;
  Landing tiles_;
  int64_t dim_, width_, tile_rows_;
  int half_;
  Signal<HardEvent::V_MTE3> summed_[2];
  Signal<HardEvent::MTE3_V> free_[2];
};

}  // namespace ascendc
}  // namespace rec_sdk
