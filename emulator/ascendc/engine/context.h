// A saved stack pointer, and the switch from one stack to another. ucontext would work too, but its system
// calls for the signal mask cost twenty times as much as the switch.
#pragma once

#include <cstddef>

#ifndef __x86_64__
#include <ucontext.h>
#endif

namespace rec_sdk::emulator {

class Context {
 public:
  // Makes the next switch to this context run enter(argument) on that stack; enter must not return.
  void start(void* stack, size_t bytes, void (*enter)(void*), void* argument);
  // Switches to `other`; the present code continues when something switches back to this context.
  void switch_to(Context* other);

 private:
#ifdef __x86_64__
  void* stack_pointer_;
#else
  ucontext_t context_;
#endif
};

}  // namespace rec_sdk::emulator
