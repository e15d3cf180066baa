// Saved contexts, and the switch from one stack to another. With ucontext a switch would take about twenty
// times as long, because it calls the system to save the signal mask.
#pragma once

#include <cstddef>

#ifndef __x86_64__
#include <ucontext.h>
#endif

namespace rec_sdk::emulator {

class Context {
 public:
  // Prepares this context so that the next switch to it calls enter(argument) on `stack`; enter must not
  // return.
  void start(void* stack, size_t bytes, void (*enter)(void*), void* argument);
  // Saves the running code in this context and switches to `other`. Returns when something switches back to
  // this context.
  void switch_to(Context* other);

 private:
#ifdef __x86_64__
  void* stack_pointer_;
#else
  ucontext_t context_;
#endif
};

}  // namespace rec_sdk::emulator
