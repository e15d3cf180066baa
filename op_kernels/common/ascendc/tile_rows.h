// Lists of the rows of an update's tile, by their number of lookups. Loading a tile fills the lists; summing
// its gradients reads them.
#pragma once

#include "op_kernels/common/ascendc/tile_plan.h"
#include "op_kernels/common/rounding.h"

namespace rec_sdk {
namespace ascendc {

// A list of rows of a tile.
struct RowList {
  int64_t count;
  uint8_t rows[kMaxTileRows];

  __aicore__ inline void add(int64_t r) { rows[count++] = static_cast<uint8_t>(r); }
};

// A row of a tile: the position of its gradient in UB, and its lookups [begin, end).
struct RowLookups {
  uint32_t place;
  int32_t begin, end;
};
struct LookedUpRows {
  RowLookups* end;
  RowLookups rows[kMaxTileRows];

  __aicore__ inline void clear() { end = rows; }
  __aicore__ inline void add(uint32_t place, int32_t first, int32_t behind_last) {
    *end++ = {place, first, behind_last};
  }
};

// The rows of a tile without a gradient, and the rows whose gradients are summed separately.
struct TileRows {
  REC_SDK_ISA::RowNumbers numbers[kMaxTileRows];  // used if weights are rounded stochastically
  RowList summed, empty;
  int64_t few;  // number of rows with more than one gradient that are summed in place
  ExtraGradients further[kMostStreamRows];
};

// Used while a tile is loaded: where the next additional gradient is loaded to, how many more fit, and the
// next sum.
struct ExtraCursor {
  LocalTensor<float> terms;
  uint32_t place, left;
  ExtraGradients* sums;
};

}  // namespace ascendc
}  // namespace rec_sdk
