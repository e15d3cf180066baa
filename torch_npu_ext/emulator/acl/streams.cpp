// The streams there are, and ACL's functions on them.
#include <acl/acl.h>
#include <pthread.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <unordered_map>
#include <vector>

#include "devices.h"
#include "errors.h"
#include "settings.h"
#include "stream.h"

namespace rec_sdk::emulator {
namespace {

using StreamPointer = std::shared_ptr<Stream>;

struct Streams {
  std::mutex mutex;
  std::unordered_map<void*, StreamPointer> created;
  StreamPointer defaults[kMaxDevices];
  Streams* of_parent = nullptr;  // after a fork; kept, so that leak checkers do not take it for lost
};

// Never destroyed: streams still run while the process ends.
Streams* streams = new Streams;

// Threads do not survive a fork. The child forgets its parent's streams, so that it never waits for one.
[[maybe_unused]] const int registered_fork_handler = pthread_atfork(nullptr, nullptr, [] {
  auto* own = new Streams;
  own->of_parent = streams;
  streams = own;
});

StreamPointer default_stream(int device) {
  const std::lock_guard<std::mutex> lock(streams->mutex);
  StreamPointer& stream = streams->defaults[device];
  if (stream == nullptr) {
    stream = std::make_shared<Stream>(device);
  }
  return stream;
}

StreamPointer created_stream(void* handle) {
  const std::lock_guard<std::mutex> lock(streams->mutex);
  const auto found = streams->created.find(handle);
  return found == streams->created.end() ? nullptr : found->second;
}

std::vector<StreamPointer> streams_of(int device) {
  const std::lock_guard<std::mutex> lock(streams->mutex);
  std::vector<StreamPointer> result;
  if (streams->defaults[device] != nullptr) {
    result.push_back(streams->defaults[device]);
  }
  for (const auto& [handle, stream] : streams->created) {
    if (stream->device == device) {
      result.push_back(stream);
    }
  }
  return result;
}

// The stream whether or not its device is in error.
aclError any_stream(const char* call, aclrtStream handle, StreamPointer* stream) {
  if (handle != nullptr) {
    *stream = created_stream(handle);
    if (*stream == nullptr) {
      return fail(ACL_ERROR_RT_PARAM_INVALID, text("%s: %p is no stream, or was destroyed", call, handle));
    }
    return ACL_SUCCESS;
  }
  if (current_device() < 0) {
    return fail(ACL_ERROR_RT_CONTEXT_NULL,
                text("%s: this thread has no device; aclrtSetDevice() chooses one", call));
  }
  *stream = default_stream(current_device());
  return ACL_SUCCESS;
}

}  // namespace

aclError find_stream(const char* call, aclrtStream handle, StreamPointer* stream) {
  const aclError error = any_stream(call, handle, stream);
  return error != ACL_SUCCESS ? error : check_device((*stream)->device);
}

aclError submit(const char* call, aclrtStream handle, Task task) {
  StreamPointer stream;
  if (const aclError error =
          task.always ? any_stream(call, handle, &stream) : find_stream(call, handle, &stream)) {
    return error;
  }
  Stream::start(stream);
  stream->add(std::move(task));
  return ACL_SUCCESS;
}

bool synchronize_streams(int device, int timeout) {
  const auto end = std::chrono::steady_clock::now() + std::chrono::milliseconds(timeout);
  for (const StreamPointer& stream : streams_of(device)) {
    int left = kForever;
    if (timeout != kForever) {
      const auto rest = end - std::chrono::steady_clock::now();
      left =
          std::max(0, static_cast<int>(std::chrono::duration_cast<std::chrono::milliseconds>(rest).count()));
    }
    if (!stream->synchronize(left)) {
      return false;
    }
  }
  return true;
}

}  // namespace rec_sdk::emulator

using namespace rec_sdk::emulator;

__attribute__((visibility("default"))) void rec_sdk_emulator_launch(void* stream, const char* name,
                                                                    const char* (*run)(void* state),
                                                                    void (*destroy)(void* state),
                                                                    void* state) {
  Task task(name, run, destroy, state);
  StreamPointer found;
  const aclError error = any_stream(name, stream, &found);
  if (error == ACL_SUCCESS) {
    if (!is_failed(found->device)) {
      Stream::start(found);
      found->add(std::move(task));
    }
    return;
  }
  // The caller has no way to learn of it, so it must not pass for a launch.
  const std::string message = aclGetRecentErrMsg();
  if (current_device() >= 0) {
    fail_device(current_device(), error, message);
  } else {
    std::fprintf(stderr, "NPU emulator: %s\n", message.c_str());
  }
}

aclError aclrtCreateStream(aclrtStream* handle) {
  *handle = nullptr;
  int device;
  if (const aclError error = use_current_device(&device)) {
    return error;
  }
  const auto stream = std::make_shared<Stream>(device);
  const std::lock_guard<std::mutex> lock(streams->mutex);
  streams->created[stream.get()] = stream;
  *handle = stream.get();
  return ACL_SUCCESS;
}

aclError aclrtCreateStreamWithConfig(aclrtStream* handle, uint32_t, uint32_t) {
  return aclrtCreateStream(handle);
}

aclError aclrtDestroyStream(aclrtStream handle) {
  StreamPointer stream = handle == nullptr ? nullptr : created_stream(handle);
  if (stream == nullptr) {
    return fail(ACL_ERROR_RT_PARAM_INVALID,
                text("aclrtDestroyStream: %p is no stream, or was destroyed", handle));
  }
  stream->synchronize(kForever);
  {
    const std::lock_guard<std::mutex> lock(streams->mutex);
    streams->created.erase(handle);
  }
  Stream::stop(stream);
  return ACL_SUCCESS;
}

aclError aclrtDestroyStreamForce(aclrtStream handle) { return aclrtDestroyStream(handle); }

aclError aclrtSynchronizeStreamWithTimeout(aclrtStream handle, int32_t timeout) {
  StreamPointer stream;
  if (const aclError error = find_stream("aclrtSynchronizeStream", handle, &stream)) {
    return error;
  }
  trace("aclrtSynchronizeStream: stream %d", stream->id);
  if (!stream->synchronize(timeout)) {
    return fail(ACL_ERROR_RT_STREAM_SYNC_TIMEOUT,
                text("aclrtSynchronizeStream: stream %d was not done after %d ms", stream->id, timeout));
  }
  return check_device(stream->device);
}

aclError aclrtSynchronizeStream(aclrtStream handle) {
  return aclrtSynchronizeStreamWithTimeout(handle, kForever);
}

aclError aclrtStreamQuery(aclrtStream handle, aclrtStreamStatus* status) {
  StreamPointer stream;
  if (const aclError error = find_stream("aclrtStreamQuery", handle, &stream)) {
    return error;
  }
  *status = stream->done() ? ACL_STREAM_STATUS_COMPLETE : ACL_STREAM_STATUS_NOT_READY;
  return check_device(stream->device);
}

aclError aclrtStreamGetId(aclrtStream handle, int32_t* id) {
  StreamPointer stream;
  if (const aclError error = any_stream("aclrtStreamGetId", handle, &stream)) {
    return error;
  }
  *id = stream->id;
  return ACL_SUCCESS;
}

aclError aclrtLaunchHostFunc(aclrtStream handle, aclrtHostFunc function, void* arguments) {
  return submit("aclrtLaunchHostFunc", handle, make_task("host function", [=] { function(arguments); }));
}
