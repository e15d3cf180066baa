// Functions of the emulated runtime, libascendcl.so, for code that emulates work on a device: kernels, aclnn
// operators, collectives. All other exported functions are the public ACL interface.
#pragma once

#include <cstdint>
#include <exception>
#include <string>
#include <utility>

extern "C" {

// Runs run(state) on `stream` (an aclrtStream) after all earlier work; null is the default stream of the
// calling thread's device. `run` returns null, or an error message that stays valid until `destroy`. After an
// error the device is in error: the message is printed, later calls that use the device fail,
// aclGetRecentErrMsg() returns the message, and queued work is dropped. `destroy(state)` always runs, also
// for dropped work. `waits`: the work may wait for something outside its stream, such as another process, so
// queries of the stream's progress must not wait for it.
void rec_sdk_emulator_launch(void* stream, const char* name, const char* (*run)(void* state),
                             void (*destroy)(void* state), void* state, bool waits);

// Makes one kernel launch fail, after `others` more launches, like a launch for which the runtime has no
// resources: nothing runs, and aclrtGetLastError() of the thread returns the error.
void rec_sdk_emulator_refuse_launch(int64_t others);
// Returns whether this launch fails: it is the selected one, or has an invalid number of cores.
bool rec_sdk_emulator_refuses(const char* kernel, int64_t blocks);

// Returns the host address of the device memory [device_address, device_address + bytes), or null if that is
// not inside one live allocation. The device address itself is never accessible.
void* rec_sdk_emulator_host_address(const void* device_address, uint64_t bytes);
}

namespace rec_sdk::emulator {

template <class Work>
struct StreamWork {
  Work work;
  std::string error;

  static const char* run(void* state) {
    auto* self = static_cast<StreamWork*>(state);
    try {
      self->work();
      return nullptr;
    } catch (const std::exception& e) {
      self->error = e.what();
    } catch (...) {
      self->error = "an exception that is no std::exception";
    }
    return self->error.c_str();
  }
  static void destroy(void* state) { delete static_cast<StreamWork*>(state); }
};

// Runs work() on the stream; the message of an exception becomes the device's error.
template <class Work>
void on_stream(void* stream, const char* name, Work work, bool waits = false) {
  using State = StreamWork<Work>;
  rec_sdk_emulator_launch(stream, name, &State::run, &State::destroy, new State{std::move(work), {}}, waits);
}

}  // namespace rec_sdk::emulator
