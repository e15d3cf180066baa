// Device side: rows in are copied to the cache while other cores look rows up. No core waits for another:
// lookups do not read the slots that are written, because lookups of rows in read them from the staging
// buffer.
#pragma once

#include "op_kernels/common/ascendc/stored_rows.h"
#include "op_kernels/scatter_rows/ascendc.h"
#include "op_kernels/swap_rows/ascendc.h"

namespace rec_sdk {
namespace ascendc {

// Uses a pipe of its own, which waits for all engines when it ends.
__aicore__ inline void write_staged_rows(const SwapRows& a) {
  if (a.count == 0) return;
  if (a.places == nullptr) {
    scatter_rows({a.cache, const_cast<uint8_t*>(a.rows), a.slots, a.bytes, a.cache_slots, a.count});
  } else {
    swap_rows(a);
  }
}

__aicore__ inline StagedWeights with_staging(const Weights& weights, const SwapRows& a) {
  StagedWeights all{};
  static_cast<Weights&>(all) = weights;
  all.staging = a.rows;
  return all;
}

}  // namespace ascendc
}  // namespace rec_sdk
