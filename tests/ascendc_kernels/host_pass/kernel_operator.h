// Bisheng's pass for the host may lack the type bfloat16_t of AscendC. Here naming it does not compile.
#pragma once

#include "torch_npu_ext/emulator/ascendc/kernel_operator.h"

#pragma GCC poison bfloat16_t
