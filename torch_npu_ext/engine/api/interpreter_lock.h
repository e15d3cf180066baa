// Acquiring and releasing the GIL in threads that may outlive the interpreter.
#pragma once

#include <cxxabi.h>
#include <pybind11/pybind11.h>
#include <unistd.h>

namespace rec_sdk {

// Runs `take`, which acquires the GIL. Before 3.14, Python unwinds the stack of a thread that acquires the
// GIL while the interpreter exits; in a destructor this would terminate the process. Here such a thread
// sleeps forever instead, as Python does from 3.14 on.
template <class Take>
auto take_lock(const Take& take) {
  try {
    return take();
  } catch (const abi::__forced_unwind&) {
    for (;;) {
      pause();
    }
  }
}

// Releases the GIL for its lifetime.
class WithoutLock {
 public:
  WithoutLock() : state_(PyEval_SaveThread()) {}
  WithoutLock(const WithoutLock&) = delete;
  WithoutLock& operator=(const WithoutLock&) = delete;
  ~WithoutLock() {
    take_lock([this] { PyEval_RestoreThread(state_); });
  }

 private:
  PyThreadState* state_;
};

}  // namespace rec_sdk
