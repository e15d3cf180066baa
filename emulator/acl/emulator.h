// Functions of the emulated runtime, libascendcl.so, that are not part of the public ACL interface. Code that
// emulates work on a device calls them: kernels, aclnn operators and collectives.
#pragma once

#include <cstdint>
#include <exception>
#include <string>
#include <utility>

extern "C" {

// Puts run(state) on `stream`, an aclrtStream, after all earlier work; null means the default stream of the
// calling thread's device. `run` returns null, or an error message that must stay valid until `destroy` is
// called. The error puts the device into error: the message is printed, queued work is dropped, later calls
// that use the device fail, and aclGetRecentErrMsg() returns the message. destroy(state) is always called,
// also for dropped work. `waits` says that the work may wait for something outside of its stream, such as
// another process; queries of the stream's progress do not wait for such work.
void rec_sdk_emulator_launch(void* stream, const char* name, const char* (*run)(void* state),
                             void (*destroy)(void* state), void* state, bool waits);

// Makes a future kernel launch fail, after `others` more launches. It fails like a launch for which the
// runtime has no resources: nothing runs, and aclrtGetLastError() of the thread returns the error.
void rec_sdk_emulator_refuse_launch(int64_t others);
// Returns whether a launch must fail, because rec_sdk_emulator_refuse_launch() selected it or its number of
// cores is invalid.
bool rec_sdk_emulator_refuses(const char* kernel, int64_t blocks);

// Returns the host address of the contents of [device_address, device_address + bytes); null if that range is
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

// Puts work() on the stream. If it throws, the message of the exception becomes the error of the device.
template <class Work>
void on_stream(void* stream, const char* name, Work work, bool waits = false) {
  using State = StreamWork<Work>;
  rec_sdk_emulator_launch(stream, name, &State::run, &State::destroy, new State{std::move(work), {}}, waits);
}

}  // namespace rec_sdk::emulator
