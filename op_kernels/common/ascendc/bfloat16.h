// bfloat16_t in kernel code. For the launches, bisheng also compiles the kernels' source for the host, where
// it may lack the type. Any 16-bit float type works there, because that code is only parsed.
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
