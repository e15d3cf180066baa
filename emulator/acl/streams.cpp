// The existing streams, and the functions of ACL for streams.
#include <acl/acl.h>
#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <unordered_map>
#include <vector>

#include "devices.h"
#include "errors.h"
#include "scheduler.h"
#include "settings.h"
#include "stream.h"
#include "timer_slack.h"

namespace rec_sdk::emulator {
namespace {

using StreamPointer = std::shared_ptr<Stream>;

struct Streams {
  std::mutex mutex;
  std::unordered_map<void*, StreamPointer> created;
  StreamPointer defaults[kMaxDevices];
  Streams* of_parent =
      nullptr;  // the parent's object after a fork; kept, so that leak checkers do not report it
};

// This object is never destroyed, because streams still run while the process ends.
Streams* streams = new Streams;

// The threads of streams do not exist in a forked child. The child therefore drops the streams of its parent,
// so that it never waits for one.
[[maybe_unused]] const int registered_fork_handler = pthread_atfork(nullptr, nullptr, [] {
  auto* own = new Streams;
  own->of_parent = streams;
  streams = own;
});

StreamPointer default_stream(int device) {
  const std::lock_guard<std::mutex> lock(streams->mutex);
  StreamPointer& stream = streams->defaults[device];
  if (stream == nullptr) {
    stream = std::make_shared<Stream>(device, runs_freely());
  }
  return stream;
}

StreamPointer created_stream(void* handle) {
  const std::lock_guard<std::mutex> lock(streams->mutex);
  const auto found = streams->created.find(handle);
  return found == streams->created.end() ? nullptr : found->second;
}

// Stores the stream of a handle in `stream`, even if its device is in error.
aclError any_stream(const char* call, aclrtStream handle, StreamPointer* stream) {
  start_alert_threads();
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

aclError submit(const char* call, aclrtStream handle, Task task, Point* point) {
  StreamPointer stream;
  if (const aclError error =
          task.always ? any_stream(call, handle, &stream) : find_stream(call, handle, &stream)) {
    return error;
  }
  on_call();
  const Point end = put(stream, std::move(task));
  if (point != nullptr) {
    *point = end;
  }
  return ACL_SUCCESS;
}

std::vector<Point> ends_of_streams(int device) {
  std::vector<Point> ends;
  const std::lock_guard<std::mutex> lock(streams->mutex);
  const auto add = [&](const StreamPointer& stream) {
    if (stream != nullptr && (device < 0 || stream->device == device)) {
      ends.push_back({stream, stream->added()});
    }
  };
  std::for_each(std::begin(streams->defaults), std::end(streams->defaults), add);
  for (const auto& [handle, stream] : streams->created) {
    add(stream);
  }
  std::sort(ends.begin(), ends.end(),
            [](const Point& a, const Point& b) { return a.stream->id < b.stream->id; });
  return ends;
}

}  // namespace rec_sdk::emulator

using namespace rec_sdk::emulator;

__attribute__((visibility("default"))) void rec_sdk_emulator_launch(void* stream, const char* name,
                                                                    const char* (*run)(void* state),
                                                                    void (*destroy)(void* state), void* state,
                                                                    bool waits) {
  Task task(name, run, destroy, state);
  task.waits = waits;
  StreamPointer found;
  const aclError error = any_stream(name, stream, &found);
  if (error == ACL_SUCCESS) {
    if (!is_failed(found->device)) {
      on_call();
      put(found, std::move(task));
    }
    return;
  }
  // The caller cannot detect this failure, so the device is put into error.
  const std::string message = aclGetRecentErrMsg();
  if (current_device() >= 0) {
    fail_device(current_device(), error, message);
  } else {
    std::fprintf(stderr, "NPU emulator: %s\n", message.c_str());
  }
}

namespace {
std::atomic<int64_t> launches_before_refusal{-1};  // -1 if no launch must be refused
}  // namespace

__attribute__((visibility("default"))) void rec_sdk_emulator_refuse_launch(int64_t others) {
  launches_before_refusal = others;
}

__attribute__((visibility("default"))) bool rec_sdk_emulator_refuses(const char* kernel, int64_t blocks) {
  constexpr int64_t kMostBlocks = 65535;
  if (blocks < 1 || blocks > kMostBlocks) {
    fail(ACL_ERROR_RT_PARAM_INVALID,
         text("kernel '%s' was not launched: it asks for %ld cores, 1 to %ld are allowed", kernel,
              static_cast<long>(blocks), static_cast<long>(kMostBlocks)));
    return true;
  }
  if (launches_before_refusal < 0 || launches_before_refusal-- > 0) {
    return false;
  }
  fail(ACL_ERROR_RT_INTERNAL_ERROR,
       text("kernel '%s' was not launched: the emulator was told to refuse it", kernel));
  return true;
}

aclError aclrtCreateStream(aclrtStream* handle) {
  *handle = nullptr;
  int device;
  if (const aclError error = use_current_device(&device)) {
    return error;
  }
  const auto stream = std::make_shared<Stream>(device, runs_freely());
  const std::lock_guard<std::mutex> lock(streams->mutex);
  streams->created[stream.get()] = stream;
  *handle = stream.get();
  start_drowsy_threads();
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
  on_call();
  wait_for({{stream, stream->added()}}, kNever);
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
  on_call();
  if (!wait_for({{stream, stream->added()}}, deadline_in(timeout))) {
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
  on_call();
  const Point end{stream, stream->added()};
  *status = end.reached() ? ACL_STREAM_STATUS_COMPLETE : ACL_STREAM_STATUS_NOT_READY;
  asked(end);
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
  Task task = make_task("host function", [=] { function(arguments); });
  task.waits = true;  // the task may wait
  return submit("aclrtLaunchHostFunc", handle, std::move(task));
}
