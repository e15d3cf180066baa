// AscendC without the type bfloat16_t, which the host pass of the compiler bisheng may lack. With this
// header, a use of the type is a compile error.
#pragma once

#include "emulator/ascendc/kernel_operator.h"

#pragma GCC poison bfloat16_t
