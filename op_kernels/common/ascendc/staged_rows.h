// Device side: copies new rows to the cache while other cores perform lookups. No core waits for another.
// Lookups of new rows read them from the staging buffer, so no lookup reads a slot that is being written.
#pragma once

#include "op_kernels/common/ascendc/stored_rows.h"
#include "op_kernels/scatter_rows/ascendc.h"
#include "op_kernels/swap_rows/ascendc.h"

namespace rec_sdk {
namespace ascendc {

// Copies or swaps the new rows into the cache. It uses its own TPipe, whose destructor waits for all engines.
__aicore__ inline void write_staged_rows(const SwapRows& a) {
  if (a.count == 0) return;
  if (a.victim_indices == nullptr) {
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
