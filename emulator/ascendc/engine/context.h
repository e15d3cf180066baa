// Where a stack stands, and the change from one to another. ucontext would do, but its system calls for the
// signal mask cost twenty times the rest.
#pragma once

#include <cstddef>

#ifndef __x86_64__
#include <ucontext.h>
#endif

namespace rec_sdk::emulator {

class Context {
 public:
  // At the next switch to it, runs enter(argument) on that stack; enter must not return.
  void start(void* stack, size_t bytes, void (*enter)(void*), void* argument);
  // Goes on there; what runs now goes on when something switches back to this.
  void switch_to(Context* other);

 private:
#ifdef __x86_64__
  void* stack_pointer_;
#else
  ucontext_t context_;
#endif
};

}  // namespace rec_sdk::emulator
