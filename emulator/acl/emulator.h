// Calls of the emulated runtime, libascendcl.so, for all that emulates work on a device: kernels, aclnn
// operators, collectives. Everything else it exports is the public ACL interface.
#pragma once

#include <cstdint>
#include <exception>
#include <string>
#include <utility>

extern "C" {

// Runs run(state) on `stream` (an aclrtStream) after all that was put on it before; null is the default
// stream of the calling thread's device. `run` returns null, or an error message that stays valid until
// `destroy`. After an error the device is in error: the message is printed, later calls that use the device
// fail, aclGetRecentErrMsg() gives it, and work that is still queued is dropped. `destroy(state)` always
// runs, also for dropped work. `waits` says that the work waits for something outside its stream, such as
// another process: a call that only asks how far the stream is may then not wait for it.
void rec_sdk_emulator_launch(void* stream, const char* name, const char* (*run)(void* state),
                             void (*destroy)(void* state), void* state, bool waits);

// The launch of a kernel that `others` more precede fails, as one that the runtime has no room for: nothing
// runs, and aclrtGetLastError() of the thread says so.
void rec_sdk_emulator_refuse_launch(int64_t others);
// Whether the launch of the kernel is that one, or one on a number of cores that no launch may have.
bool rec_sdk_emulator_refuses(const char* kernel, int64_t blocks);

// Where the emulator may touch the device memory [device_address, device_address + bytes), or null when that
// is not inside one live allocation. The device address itself is never accessible.
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

// Runs work() on the stream; what an exception says becomes the device's error.
template <class Work>
void on_stream(void* stream, const char* name, Work work, bool waits = false) {
  using State = StreamWork<Work>;
  rec_sdk_emulator_launch(stream, name, &State::run, &State::destroy, new State{std::move(work), {}}, waits);
}

}  // namespace rec_sdk::emulator
