// Events: recorded points in streams, which other streams and threads can wait for.
#include <acl/acl.h>

#include <chrono>
#include <memory>
#include <mutex>
#include <unordered_map>

#include "errors.h"
#include "scheduler.h"
#include "stream.h"

namespace rec_sdk::emulator {
namespace {

// An event: its latest recorded point in a stream, and the time when a point was reached. A wait for an event
// is a wait for the point at the time of the call, even if the event is recorded again later.
class Event {
 public:
  explicit Event(bool timed) : timed(timed) {}

  const bool timed;

  // Records the event. put(number, &point) puts record `number` on a stream and stores its point.
  template <class Put>
  aclError record(int device, Put put) {
    const std::lock_guard<std::mutex> lock(record_mutex_);
    Point point;
    if (const aclError error = put(records_ + 1, &point)) {
      return error;
    }
    const std::lock_guard<std::mutex> lock_all(mutex_);
    device_ = device;
    ++records_;
    point_ = std::move(point);
    return ACL_SUCCESS;
  }

  // Stores the time at which the stream reached record `number`.
  void reach(uint64_t number) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (number > timed_record_) {
      timed_record_ = number;
      time_ = Clock::now();
    }
  }

  // Returns the point of the latest record.
  Point point() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return point_;
  }

  // Stores the time at which the latest record was reached. Returns false if the event was never recorded or
  // the record is not reached yet.
  bool time(Clock::time_point* time) {
    const std::lock_guard<std::mutex> lock(mutex_);
    *time = time_;
    return records_ > 0 && timed_record_ == records_ && point_.reached();
  }

  // Returns the error of the device on which the event was recorded.
  aclError check() {
    int device;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      device = device_;
    }
    return device < 0 ? ACL_SUCCESS : check_device(device);
  }

 private:
  std::mutex record_mutex_;  // keeps records in order; may be held for a long time
  std::mutex mutex_;
  Point point_;
  uint64_t records_ = 0, timed_record_ = 0;
  int device_ = -1;
  Clock::time_point time_;
};

using EventPointer = std::shared_ptr<Event>;

// This object is never destroyed, because streams still run while the process ends.
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

// Returns whether the latest record of the event is reached.
bool query(Event& event) {
  on_call();
  const Point point = event.point();
  const bool reached = point.reached();
  asked(point);
  return reached;
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
  return event->record(stream->device, [&](uint64_t number, Point* point) {
    Task task = make_task("record of an event", [event, number] { event->reach(number); });
    task.always = true;
    return submit("aclrtRecordEvent", stream_handle, std::move(task), point);
  });
}

// Only checks the handle: every wait refers to one record, so there is no state to reset.
aclError aclrtResetEvent(aclrtEvent handle, aclrtStream) {
  EventPointer event;
  return find_event("aclrtResetEvent", handle, &event);
}

aclError aclrtStreamWaitEvent(aclrtStream stream, aclrtEvent handle) {
  EventPointer event;
  if (const aclError error = find_event("aclrtStreamWaitEvent", handle, &event)) {
    return error;
  }
  return submit("aclrtStreamWaitEvent", stream, Task("wait for an event", event->point()));
}

aclError aclrtSynchronizeEventWithTimeout(aclrtEvent handle, int32_t timeout) {
  EventPointer event;
  if (const aclError error = find_event("aclrtSynchronizeEvent", handle, &event)) {
    return error;
  }
  on_call();
  if (!wait_for({event->point()}, deadline_in(timeout))) {
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
  *status = query(*event) ? ACL_EVENT_RECORDED_STATUS_COMPLETE : ACL_EVENT_RECORDED_STATUS_NOT_READY;
  return event->check();
}

aclError aclrtQueryEventWaitStatus(aclrtEvent handle, aclrtEventWaitStatus* status) {
  EventPointer event;
  if (const aclError error = find_event("aclrtQueryEventWaitStatus", handle, &event)) {
    return error;
  }
  *status = query(*event) ? ACL_EVENT_WAIT_STATUS_COMPLETE : ACL_EVENT_WAIT_STATUS_NOT_READY;
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
