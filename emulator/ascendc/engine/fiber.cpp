#include "emulator/ascendc/engine/fiber.h"

#include <sys/mman.h>
#include <unistd.h>

#include <new>
#include <utility>

#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif

namespace rec_sdk::emulator {
namespace {

void leave_stack([[maybe_unused]] void** fake_stack, [[maybe_unused]] const void* to,
                 [[maybe_unused]] size_t bytes) {
#ifdef __SANITIZE_ADDRESS__
  __sanitizer_start_switch_fiber(fake_stack, to, bytes);
#endif
}

void enter_stack([[maybe_unused]] void* fake_stack, [[maybe_unused]] const void** from,
                 [[maybe_unused]] size_t* bytes) {
#ifdef __SANITIZE_ADDRESS__
  __sanitizer_finish_switch_fiber(fake_stack, from, bytes);
#endif
}

// Clears the address sanitizer's marks of functions that were on the stack and never returned.
void forget_stack([[maybe_unused]] void* stack, [[maybe_unused]] size_t bytes) {
#ifdef __SANITIZE_ADDRESS__
  __asan_unpoison_memory_region(stack, bytes);
#endif
}

}  // namespace

Fiber::Fiber(std::function<void()> work) : work_(std::move(work)) {
  // The page below the stack is inaccessible, so that a stack overflow faults.
  const size_t page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  mapped_ = kStackBytes + page;
  stack_ = mmap(nullptr, mapped_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (stack_ == MAP_FAILED || mprotect(stack_, page, PROT_NONE) != 0) {
    throw std::bad_alloc();
  }
}

Fiber::~Fiber() { munmap(stack_, mapped_); }

void Fiber::enter(void* self) {
  auto* fiber = static_cast<Fiber*>(self);
  enter_stack(nullptr, &fiber->resumer_stack_, &fiber->resumer_bytes_);
  for (;;) {
    fiber->work_();
    fiber->stop();
  }
}

void Fiber::resume() {
  if (!started_) {
    started_ = true;
    forget_stack(stack_, mapped_);
    context_.start(stack_, mapped_, enter, this);
  }
  void* fake_stack = nullptr;
  leave_stack(&fake_stack, stack_, mapped_);
  resumer_.switch_to(&context_);
  enter_stack(fake_stack, nullptr, nullptr);
}

void Fiber::stop() {
  leave_stack(&fake_stack_, resumer_stack_, resumer_bytes_);
  context_.switch_to(&resumer_);
  enter_stack(fake_stack_, &resumer_stack_, &resumer_bytes_);
}

void Fiber::rewind() { started_ = false; }

}  // namespace rec_sdk::emulator
