// Bisheng's pass for the host may lack the type bfloat16_t of AscendC. Here naming it does not compile.
#pragma once

#include "emulator/ascendc/kernel_operator.h"

#pragma GCC poison bfloat16_t
