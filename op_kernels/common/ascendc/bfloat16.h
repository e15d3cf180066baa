// bfloat16_t where kernels run. bisheng compiles their source for the host too, where launches are, and need
// not know the type there: any 16-bit float serves for code that is only parsed.
#pragma once

#include "op_kernels/common/ascendc/memory.h"

namespace rec_sdk {
namespace ascendc {

#if defined(__NPU_HOST__) || defined(__ASCC_HOST__)
using BFloat16 = half;
#else
using BFloat16 = bfloat16_t;
#endif

}  // namespace ascendc
}  // namespace rec_sdk
