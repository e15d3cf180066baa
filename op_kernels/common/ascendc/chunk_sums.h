// The second launch of hot rows: sums of their chunks, in equal shares.
#pragma once

#include "op_kernels/common/ascendc/hot_rows.h"

namespace rec_sdk {
namespace ascendc {

class ChunkSums {
 public:
  __aicore__ inline void run(TPipe* pipe, const Segments& segments, const HotWorkspace& workspace) {
    dim_ = segments.dim;
    workspace_ = workspace;
    parts_.init(pipe, workspace);
    int64_t chunks = 0;
    for (int64_t p = 0; p < parts_.count(); ++p) chunks += parts_.get(p, kChunks);
    const Share share = share_of_core(chunks);
    if (share.begin == share.end) return;
    plan(pipe, segments.lookups);
    int64_t before = 0;
    for (int64_t p = 0; p < parts_.count() && before < share.end; ++p) {
      const int64_t of_part = parts_.get(p, kChunks);
      if (before + of_part > share.begin) {
        part(p, maximum<int64_t>(share.begin - before, 0), minimum(share.end - before, of_part));
      }
      before += of_part;
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

  // Chunks [begin, end) of a part.
  __aicore__ inline void part(int64_t p, int64_t begin, int64_t end) {
    const int64_t rows = parts_.get(p, kHotRows);
    for (int64_t i = first_entry(p, rows, begin); i < rows; ++i) {
      const int64_t before = parts_.entry(p, i, kChunksBefore), chunks = parts_.entry(p, i, kRowChunks);
      if (before >= end) return;
      hot_row(parts_.entry(p, i, kLookup), maximum<int64_t>(begin - before, 0),
              minimum(end - before, chunks));
    }
  }

  // The last hot row of the part that begins at or before a chunk of it.
  __aicore__ inline int64_t first_entry(int64_t p, int64_t rows, int64_t chunk) {
    int64_t low = 0, high = rows - 1;
    while (low < high) {
      const int64_t middle = (low + high + 1) / 2;
      if (parts_.entry(p, middle, kChunksBefore) <= chunk) {
        low = middle;
      } else {
        high = middle - 1;
      }
    }
    return low;
  }

  // Chunks [begin, end) of the row whose lookups begin at `lookup`.
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
  HotParts parts_;
  LookupIndex index_;
  GradientSums sums_;
  Scratch tiles_;
  int64_t dim_, width_, tile_rows_;
  int half_;
  Signal<HardEvent::V_MTE3> summed_[2];
  Signal<HardEvent::MTE3_V> free_[2];
};

}  // namespace ascendc
}  // namespace rec_sdk
