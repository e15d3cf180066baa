// The rules for a tensor in local memory that an instruction works on.
#pragma once

#include "emulator/ascendc/engine/core.h"

namespace rec_sdk::emulator {

// The first `bytes` of the tensor, which must be alive and hold them.
UbSpan operand(Core& core, const UbTensor& tensor, uint64_t bytes, const char* role);
// For all but the scalar unit: it must start at a multiple of 32 bytes too.
UbSpan aligned_operand(Core& core, const UbTensor& tensor, uint64_t bytes, const char* role);

}  // namespace rec_sdk::emulator
