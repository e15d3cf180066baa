// Events: points in a stream that other streams and threads wait for.
#include <acl/acl.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <unordered_map>

#include "errors.h"
#include "stream.h"

namespace rec_sdk::emulator {
namespace {

using Clock = std::chrono::steady_clock;

// An event can be recorded again while somebody waits for an earlier record, so records are counted.
class Event {
 public:
  explicit Event(bool timed) : timed(timed) {}

  const bool timed;

  uint64_t begin_record(int device) {
    const std::lock_guard<std::mutex> lock(mutex_);
    device_ = device;
    return ++recorded_;
  }

  void finish_record(uint64_t record) {
    const std::lock_guard<std::mutex> lock(mutex_);
    finished_ = std::max(finished_, record);
    time_ = Clock::now();
    progress_.notify_all();
  }

  // The latest record, 0 if there was none.
  uint64_t latest() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return recorded_;
  }

  bool wait(uint64_t record, int timeout) {
    std::unique_lock<std::mutex> lock(mutex_);
    const auto reached = [&] { return finished_ >= record; };
    if (timeout == kForever) {
      progress_.wait(lock, reached);
      return true;
    }
    return progress_.wait_for(lock, std::chrono::milliseconds(timeout), reached);
  }

  bool complete() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return finished_ == recorded_;
  }

  // When the latest record was reached; false if it was not, or there is none.
  bool time(Clock::time_point* time) {
    const std::lock_guard<std::mutex> lock(mutex_);
    *time = time_;
    return recorded_ > 0 && finished_ == recorded_;
  }

  // The error of the device it was recorded on.
  aclError check() {
    int device;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      device = device_;
    }
    return device < 0 ? ACL_SUCCESS : check_device(device);
  }

 private:
  std::mutex mutex_;
  std::condition_variable progress_;
  uint64_t recorded_ = 0, finished_ = 0;
  int device_ = -1;
  Clock::time_point time_;
};

using EventPointer = std::shared_ptr<Event>;

// Never destroyed: streams still run while the process ends.
std::mutex& events_mutex = *new std::mutex;
std::unordered_map<void*, EventPointer>& events = *new std::unordered_map<void*, EventPointer>;

aclError find_event(const char* call, aclrtEvent handle, EventPointer* event) {
  const std::lock_guard<std::mutex> lock(events_mutex);
  const auto found = events.find(handle);
  if (found == events.end()) {
    return fail(ACL_ERROR_RT_PARAM_INVALID, text("%s: %p is no event, or was destroyed", call, handle));
  }
  *event = found->second;
  return ACL_SUCCESS;
}

}  // namespace
}  // namespace rec_sdk::emulator

using namespace rec_sdk::emulator;

aclError aclrtCreateEventWithFlag(aclrtEvent* handle, uint32_t flags) {
  *handle = nullptr;
  if (flags & ACL_EVENT_IPC) {
    return fail(ACL_ERROR_RT_FEATURE_NOT_SUPPORT,
                "aclrtCreateEvent: events between processes are not emulated");
  }
  const auto event = std::make_shared<Event>((flags & ACL_EVENT_TIME_LINE) != 0);
  const std::lock_guard<std::mutex> lock(events_mutex);
  events[event.get()] = event;
  *handle = event.get();
  return ACL_SUCCESS;
}

aclError aclrtCreateEventExWithFlag(aclrtEvent* handle, uint32_t flags) {
  return aclrtCreateEventWithFlag(handle, flags);
}

aclError aclrtCreateEvent(aclrtEvent* handle) {
  return aclrtCreateEventWithFlag(handle, ACL_EVENT_TIME_LINE | ACL_EVENT_SYNC);
}

aclError aclrtDestroyEvent(aclrtEvent handle) {
  const std::lock_guard<std::mutex> lock(events_mutex);
  if (events.erase(handle) == 0) {
    return fail(ACL_ERROR_RT_PARAM_INVALID,
                text("aclrtDestroyEvent: %p is no event, or was destroyed", handle));
  }
  return ACL_SUCCESS;
}

aclError aclrtRecordEvent(aclrtEvent handle, aclrtStream stream_handle) {
  EventPointer event;
  std::shared_ptr<Stream> stream;
  aclError error = find_event("aclrtRecordEvent", handle, &event);
  if (error == ACL_SUCCESS) {
    error = find_stream("aclrtRecordEvent", stream_handle, &stream);
  }
  if (error != ACL_SUCCESS) {
    return error;
  }
  const uint64_t record = event->begin_record(stream->device);
  Task task = make_task("record of an event", [event, record] { event->finish_record(record); });
  task.always = true;
  return submit("aclrtRecordEvent", stream_handle, std::move(task));
}

// Every record counts for itself, so there is nothing to reset.
aclError aclrtResetEvent(aclrtEvent handle, aclrtStream) {
  EventPointer event;
  return find_event("aclrtResetEvent", handle, &event);
}

aclError aclrtStreamWaitEvent(aclrtStream stream, aclrtEvent handle) {
  EventPointer event;
  if (const aclError error = find_event("aclrtStreamWaitEvent", handle, &event)) {
    return error;
  }
  const uint64_t record = event->latest();
  return submit("aclrtStreamWaitEvent", stream,
                make_task("wait for an event", [event, record] { event->wait(record, kForever); }));
}

aclError aclrtSynchronizeEventWithTimeout(aclrtEvent handle, int32_t timeout) {
  EventPointer event;
  if (const aclError error = find_event("aclrtSynchronizeEvent", handle, &event)) {
    return error;
  }
  if (!event->wait(event->latest(), timeout)) {
    return fail(ACL_ERROR_RT_EVENT_SYNC_TIMEOUT,
                text("aclrtSynchronizeEvent: the event was not reached after %d ms", timeout));
  }
  return event->check();
}

aclError aclrtSynchronizeEvent(aclrtEvent handle) {
  return aclrtSynchronizeEventWithTimeout(handle, kForever);
}

aclError aclrtQueryEventStatus(aclrtEvent handle, aclrtEventRecordedStatus* status) {
  EventPointer event;
  if (const aclError error = find_event("aclrtQueryEventStatus", handle, &event)) {
    return error;
  }
  *status = event->complete() ? ACL_EVENT_RECORDED_STATUS_COMPLETE : ACL_EVENT_RECORDED_STATUS_NOT_READY;
  return event->check();
}

aclError aclrtQueryEventWaitStatus(aclrtEvent handle, aclrtEventWaitStatus* status) {
  EventPointer event;
  if (const aclError error = find_event("aclrtQueryEventWaitStatus", handle, &event)) {
    return error;
  }
  *status = event->complete() ? ACL_EVENT_WAIT_STATUS_COMPLETE : ACL_EVENT_WAIT_STATUS_NOT_READY;
  return event->check();
}

aclError aclrtEventElapsedTime(float* milliseconds, aclrtEvent start_handle, aclrtEvent end_handle) {
  EventPointer start, end;
  aclError error = find_event("aclrtEventElapsedTime", start_handle, &start);
  if (error == ACL_SUCCESS) {
    error = find_event("aclrtEventElapsedTime", end_handle, &end);
  }
  if (error != ACL_SUCCESS) {
    return error;
  }
  Clock::time_point from, to;
  if (!start->timed || !end->timed || !start->time(&from) || !end->time(&to)) {
    return fail(
        ACL_ERROR_RT_EVENT_TIMESTAMP_INVALID,
        "aclrtEventElapsedTime: both events must be made with ACL_EVENT_TIME_LINE, recorded and reached");
  }
  *milliseconds = std::chrono::duration<float, std::milli>(to - from).count();
  return ACL_SUCCESS;
}

aclError aclrtEventGetTimestamp(aclrtEvent handle, uint64_t* microseconds) {
  EventPointer event;
  if (const aclError error = find_event("aclrtEventGetTimestamp", handle, &event)) {
    return error;
  }
  Clock::time_point time;
  if (!event->time(&time)) {
    return fail(ACL_ERROR_RT_EVENT_TIMESTAMP_INVALID,
                "aclrtEventGetTimestamp: the event is not recorded or reached");
  }
  *microseconds = static_cast<uint64_t>(
      std::chrono::duration_cast<std::chrono::microseconds>(time.time_since_epoch()).count());
  return ACL_SUCCESS;
}
