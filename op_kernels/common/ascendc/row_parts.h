// Device side: rows as units of work. A unit is a whole row, or a part of one if rows are longer than a tile
// or too few for the cores.
#pragma once

#include "op_kernels/common/ascendc/memory.h"

namespace rec_sdk {
namespace ascendc {

class RowParts {
 public:
  RowParts() = default;

  // Divides `count` rows of `size` values; a part has at most `limit` values and is a multiple of `multiple`,
  // unless it ends the row. `smallest`: the smallest size that is worth a separate copy.
  __aicore__ inline RowParts(int64_t count, int64_t size, int64_t limit, int64_t smallest, int64_t multiple)
      : count_(count), size_(size) {
    const int64_t for_tile = ceil_div(size, limit);
    const int64_t for_balance =
        minimum(ceil_div(kUnitsOfCore * AscendC::GetBlockNum(), count), ceil_div(size, smallest));
    part_ = minimum(align_up(ceil_div(size, maximum(for_tile, for_balance)), multiple), size);
    parts_ = ceil_div(size, part_);
  }

  __aicore__ inline int64_t units() const { return count_ * parts_; }
  __aicore__ inline bool whole() const { return parts_ == 1; }
  __aicore__ inline int64_t longest() const { return part_; }

  // If rows are not divided, no integer division is needed, which is slow on the scalar unit.
  __aicore__ inline int64_t row(int64_t unit) const { return whole() ? unit : unit / parts_; }
  __aicore__ inline int64_t offset(int64_t unit) const { return whole() ? 0 : unit % parts_ * part_; }
  __aicore__ inline int64_t size(int64_t unit) const { return minimum(part_, size_ - offset(unit)); }

 private:
  static constexpr int64_t kUnitsOfCore = 8;  // enough that one more or less hardly matters

  int64_t count_ = 0, size_ = 0, part_ = 0, parts_ = 1;
};

}  // namespace ascendc
}  // namespace rec_sdk
