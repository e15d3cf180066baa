// Includes the instructions that stand for the scalar unit's instructions, for the compiler's target machine.
#pragma once

#if defined(__x86_64__)
#include "assembler_x86_64.h"
#elif defined(__aarch64__)
#include "assembler_aarch64.h"
#else
#error "scalar instructions are counted in x86-64 and in 64-bit Arm code"
#endif
