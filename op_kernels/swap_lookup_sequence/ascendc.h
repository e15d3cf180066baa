#pragma once

#include "op_kernels/common/ascendc/staged_rows.h"
#include "op_kernels/lookup_sequence/ascendc.h"

namespace rec_sdk {
namespace ascendc {

__aicore__ inline void swap_lookup_sequence(const SwapLookupSequence& a) {
  write_staged_rows(a.swap);
  LookupSequence lookup = a.lookup;
  lookup.slots = a.origins;
  if (lookup.count > 0) lookup_sequence_in(with_staging(lookup.weights, a.swap), lookup);
}

}  // namespace ascendc
}  // namespace rec_sdk
