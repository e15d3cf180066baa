#pragma once

// Lines with this mark count as instructions. Lines without it emulate hardware and are not counted.
#define REC_SDK_INSTRUCTION "//scalar\n\t"

#define REC_SDK_LOAD1(value, at) asm volatile("ldrb %w0, %1 " REC_SDK_INSTRUCTION : "=r"(value) : "m"(at))
#define REC_SDK_LOAD4(value, at) asm volatile("ldr %w0, %1 " REC_SDK_INSTRUCTION : "=r"(value) : "m"(at))
#define REC_SDK_LOAD8(value, at) asm volatile("ldr %0, %1 " REC_SDK_INSTRUCTION : "=r"(value) : "m"(at))
#define REC_SDK_STORE4(at, value) asm volatile("str %w1, %0 " REC_SDK_INSTRUCTION : "=m"(at) : "r"(value))
#define REC_SDK_STORE8(at, value) asm volatile("str %1, %0 " REC_SDK_INSTRUCTION : "=m"(at) : "r"(value))

// A copy has two words of settings in addition to its addresses.
#define REC_SDK_COPY(function, to, from, blocks, gaps)                \
  asm volatile(                                                       \
      "str x30, [sp, #-16]!\n\t"                                      \
      "adrp x16, scalar_unit_operands\n\t"                            \
      "add x16, x16, :lo12:scalar_unit_operands\n\t"                  \
      "stp %0, %1, [x16]\n\tstp %2, %3, [x16, #16]\n\t"               \
      "bl " function " " REC_SDK_INSTRUCTION "ldr x30, [sp], #16\n\t" \
      :                                                               \
      : "r"(to), "r"(from), "r"(blocks), "r"(gaps)                    \
      : "x16")

#define REC_SDK_ALL_REGISTERS(does)                                                                       \
  does " x0, x1, [sp]\n\t" does " x2, x3, [sp, #16]\n\t" does " x4, x5, [sp, #32]\n\t" does               \
       " x6, x7, [sp, #48]\n\t" does " x8, x9, [sp, #64]\n\t" does " x10, x11, [sp, #80]\n\t" does        \
       " x12, x13, [sp, #96]\n\t" does " x14, x15, [sp, #112]\n\t" does " x16, x17, [sp, #128]\n\t" does  \
       " x18, x30, [sp, #144]\n\t" does " q0, q1, [sp, #160]\n\t" does " q2, q3, [sp, #192]\n\t" does     \
       " q4, q5, [sp, #224]\n\t" does " q6, q7, [sp, #256]\n\t" does " q8, q9, [sp, #288]\n\t" does       \
       " q10, q11, [sp, #320]\n\t" does " q12, q13, [sp, #352]\n\t" does " q14, q15, [sp, #384]\n\t" does \
       " q16, q17, [sp, #416]\n\t" does " q18, q19, [sp, #448]\n\t" does " q20, q21, [sp, #480]\n\t" does \
       " q22, q23, [sp, #512]\n\t" does " q24, q25, [sp, #544]\n\t" does " q26, q27, [sp, #576]\n\t" does \
       " q28, q29, [sp, #608]\n\t" does " q30, q31, [sp, #640]\n\t"

// Defines a function `name` that calls scalar_unit_do_copy(`in`) and preserves every register.
#define REC_SDK_KEEPS_REGISTERS(name, in)                                                                  \
  asm(".text\n.globl " name "\n" name ":\n\tsub sp, sp, #688\n\t" REC_SDK_ALL_REGISTERS(                   \
      "stp") "mrs x0, nzcv\n\tstr x0, [sp, #672]\n\tmov w0, #" in                                          \
             "\n\tbl scalar_unit_do_copy\n\tldr x0, [sp, #672]\n\tmsr nzcv, x0\n\t" REC_SDK_ALL_REGISTERS( \
                 "ldp") "add sp, sp, #688\n\tret\n")
