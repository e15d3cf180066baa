#include "emulator/ascendc/engine/context.h"

#include <cstdint>
#include <cstring>

#ifdef __x86_64__

// Saves the registers that a function must preserve, in the order in which start() below expects them. The
// floating-point control words are not saved, because neither the emulator nor a kernel changes them.
asm(R"(
  .pushsection .text
  .type rec_sdk_switch_stack, @function
rec_sdk_switch_stack:
  push %rbp
  push %rbx
  push %r12
  push %r13
  push %r14
  push %r15
  mov %rsp, (%rdi)
  mov %rsi, %rsp
  pop %r15
  pop %r14
  pop %r13
  pop %r12
  pop %rbx
  pop %rbp
  ret
  .size rec_sdk_switch_stack, .-rec_sdk_switch_stack

  .type rec_sdk_start_stack, @function
rec_sdk_start_stack:
  .cfi_startproc
  .cfi_undefined %rip
  mov %r12, %rdi
  call *%r13
  ud2
  .cfi_endproc
  .size rec_sdk_start_stack, .-rec_sdk_start_stack
  .popsection
)");

extern "C" {
void rec_sdk_switch_stack(void** from, void* to);
void rec_sdk_start_stack();
}

namespace rec_sdk::emulator {

void Context::start(void* stack, size_t bytes, void (*enter)(void*), void* argument) {
  auto** top = reinterpret_cast<void**>(reinterpret_cast<uintptr_t>(stack) + bytes) - 2;
  void* const start = reinterpret_cast<void*>(&rec_sdk_start_stack);
  void* const function = reinterpret_cast<void*>(enter);
  // The initial values of r15, r14, r13, r12, rbx and rbp, and the return address.
  void* const frame[] = {nullptr, nullptr, function, argument, nullptr, nullptr, start};
  stack_pointer_ = std::memcpy(top - sizeof frame / sizeof frame[0], frame, sizeof frame);
}

void Context::switch_to(Context* other) { rec_sdk_switch_stack(&stack_pointer_, other->stack_pointer_); }

}  // namespace rec_sdk::emulator

#else

namespace rec_sdk::emulator {
namespace {

// makecontext() passes only integers of type int, so each pointer is split into two.
void enter_parts(unsigned enter_high, unsigned enter_low, unsigned high, unsigned low) {
  const auto whole = [](unsigned upper, unsigned lower) {
    return static_cast<uintptr_t>(upper) << 32 | lower;
  };
  reinterpret_cast<void (*)(void*)>(whole(enter_high, enter_low))(reinterpret_cast<void*>(whole(high, low)));
}

}  // namespace

void Context::start(void* stack, size_t bytes, void (*enter)(void*), void* argument) {
  getcontext(&context_);
  context_.uc_stack.ss_sp = stack;
  context_.uc_stack.ss_size = bytes;
  context_.uc_link = nullptr;
  const auto function = reinterpret_cast<uintptr_t>(enter), self = reinterpret_cast<uintptr_t>(argument);
  makecontext(&context_, reinterpret_cast<void (*)()>(enter_parts), 4, static_cast<unsigned>(function >> 32),
              static_cast<unsigned>(function), static_cast<unsigned>(self >> 32),
              static_cast<unsigned>(self));
}

void Context::switch_to(Context* other) { swapcontext(&context_, &other->context_); }

}  // namespace rec_sdk::emulator

#endif
