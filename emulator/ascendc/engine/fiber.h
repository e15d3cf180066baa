// A function with its own stack, which can be suspended and resumed.
#pragma once

#include <cstddef>
#include <functional>

#include "emulator/ascendc/engine/context.h"

namespace rec_sdk::emulator {

class Fiber {
 public:
  explicit Fiber(std::function<void()> work);
  ~Fiber();
  Fiber(const Fiber&) = delete;
  Fiber& operator=(const Fiber&) = delete;

  // Runs the function from where it stopped until it stops again or ends. If it has ended, it starts again.
  void resume();
  // Suspends the function and returns to the caller of resume(). Only the function itself may call it.
  void stop();
  // Makes the next resume() start the function again. Objects on its stack are not destroyed.
  void rewind();

 private:
  static constexpr size_t kStackBytes = 512 * 1024;
  static void enter(void* self);

  std::function<void()> work_;
  void* stack_;
  size_t mapped_;
  bool started_ = false;
  Context context_, resumer_;
  // State for the address sanitizer, which must be notified of every switch of the stack.
  void* fake_stack_ = nullptr;
  const void* resumer_stack_ = nullptr;
  size_t resumer_bytes_ = 0;
};

}  // namespace rec_sdk::emulator
