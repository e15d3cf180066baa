#pragma once

#include "op_kernels/common/ascendc/move_rows.h"

namespace rec_sdk {
namespace ascendc {

__aicore__ inline void scatter_rows(const CopyRows& a) {
  TPipe pipe;
  RowMover<Direction::kToTable> mover;
  mover.run(&pipe, {a.cache, a.bytes, a.rows, a.slots, a.bytes, a.count});
}

}  // namespace ascendc
}  // namespace rec_sdk
