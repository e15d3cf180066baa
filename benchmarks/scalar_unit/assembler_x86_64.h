#pragma once

// Lines with this mark count as instructions. Lines without it emulate hardware and are not counted.
#define REC_SDK_INSTRUCTION "#scalar\n\t"

#define REC_SDK_LOAD1(value, at) asm volatile("movzbl %1, %0 " REC_SDK_INSTRUCTION : "=r"(value) : "m"(at))
#define REC_SDK_LOAD4(value, at) asm volatile("movl %1, %0 " REC_SDK_INSTRUCTION : "=r"(value) : "m"(at))
#define REC_SDK_LOAD8(value, at) asm volatile("movq %1, %0 " REC_SDK_INSTRUCTION : "=r"(value) : "m"(at))
#define REC_SDK_STORE4(at, value) asm volatile("movl %1, %0 " REC_SDK_INSTRUCTION : "=m"(at) : "r"(value))
#define REC_SDK_STORE8(at, value) asm volatile("movq %1, %0 " REC_SDK_INSTRUCTION : "=m"(at) : "r"(value))

// A copy has two words of settings in addition to its addresses.
#define REC_SDK_COPY(function, to, from, blocks, gaps) \
  asm volatile(                                        \
      "movq %0, scalar_unit_operands(%%rip)\n\t"       \
      "movq %1, 8+scalar_unit_operands(%%rip)\n\t"     \
      "movq %2, 16+scalar_unit_operands(%%rip)\n\t"    \
      "movq %3, 24+scalar_unit_operands(%%rip)\n\t"    \
      "call " function " " REC_SDK_INSTRUCTION         \
      :                                                \
      : "r"(to), "r"(from), "r"(blocks), "r"(gaps))

// Defines a function `name` that calls scalar_unit_do_copy(`in`) and preserves every register.
#define REC_SDK_KEEPS_REGISTERS(name, in)                                                                \
  asm(".text\n.globl " name "\n" name                                                                    \
      ":\n\tpushfq\n\tpushq %rax\n\tpushq %rcx\n\tpushq %rdx\n\tpushq %rsi\n\tpushq %rdi\n\tpushq %r8\n" \
      "\tpushq %r9\n\tpushq %r10\n\tpushq %r11\n\tpushq %rbx\n\tmovq %rsp, %rbx\n\tandq $-64, %rsp\n"    \
      "\tsubq $512, %rsp\n\tfxsave64 (%rsp)\n\tmovl $" in                                                \
      ", %edi\n\tcall scalar_unit_do_copy\n\tfxrstor64 (%rsp)\n\tmovq %rbx, %rsp\n\tpopq %rbx\n"         \
      "\tpopq %r11\n\tpopq %r10\n\tpopq %r9\n\tpopq %r8\n\tpopq %rdi\n\tpopq %rsi\n\tpopq %rdx\n"        \
      "\tpopq %rcx\n\tpopq %rax\n\tpopfq\n\tret\n")
