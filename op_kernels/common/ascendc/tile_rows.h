// Which rows of a tile of an update have how many lookups: what its loads leave to its sums.
#pragma once

#include "op_kernels/common/ascendc/tile_plan.h"
#include "op_kernels/common/rounding.h"

namespace rec_sdk {
namespace ascendc {

// Rows of a tile.
struct RowList {
  int64_t count;
  uint8_t rows[kMaxTileRows];

  __aicore__ inline void add(int64_t r) { rows[count++] = static_cast<uint8_t>(r); }
};

// Rows of a tile: where the gradient of each is, and its lookups.
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

// Which rows of a tile have no gradient, and which a sum of their own.
struct TileRows {
  REC_SDK_ISA::RowNumbers numbers[kMaxTileRows];  // where weights round stochastically
  RowList summed, empty;
  int64_t few;  // rows of more than one gradient which add up where they are
  FurtherGradients further[kMostStreamRows];
};

// While a tile is loaded: where the next further gradient goes, how many there is room for, and the next sum.
struct Further {
  LocalTensor<float> terms;
  uint32_t place, left;
  FurtherGradients* sums;
};

}  // namespace ascendc
}  // namespace rec_sdk
