// Acquiring and releasing the GIL in threads that may outlive the interpreter.
#pragma once

#include <cxxabi.h>
#include <pybind11/pybind11.h>
#include <unistd.h>

namespace rec_sdk {

// Runs `take`, which acquires the GIL. If the interpreter is exiting, Python before 3.14 unwinds the stack of
// the acquiring thread, which in a destructor would terminate the process. Here such a thread sleeps forever
// instead, as in Python 3.14.
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

// Releases the GIL while the object exists.
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
