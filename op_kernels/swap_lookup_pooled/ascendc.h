#pragma once

#include "op_kernels/common/ascendc/staged_rows.h"
#include "op_kernels/lookup_pooled/ascendc.h"

namespace rec_sdk {
namespace ascendc {

__aicore__ inline void swap_lookup_pooled(const SwapLookupPooled& a) {
  write_staged_rows(a.swap);
  LookupPooled lookup = a.lookup;
  lookup.slots = a.origins;
  if (lookup.bags.count > 0) lookup_pooled_in(with_staging(lookup.weights, a.swap), lookup);
}

}  // namespace ascendc
}  // namespace rec_sdk
