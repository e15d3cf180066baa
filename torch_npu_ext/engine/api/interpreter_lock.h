// The interpreter's lock, for threads that may outlive the interpreter.
#pragma once

#include <cxxabi.h>
#include <pybind11/pybind11.h>
#include <unistd.h>

namespace rec_sdk {

// Runs `take`, which takes the interpreter's lock. Python before 3.14 unwinds the stack of a thread that asks
// for the lock while the interpreter ends; in a destructor that would end the process. Here the thread stays,
// as from 3.14 on.
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

// Other threads may run Python meanwhile.
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
