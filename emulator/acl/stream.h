// A stream: a queue of work that the stream's thread executes in order.
#pragma once

#include <acl/acl.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "emulator.h"

namespace rec_sdk::emulator {

constexpr int kForever = -1;  // a timeout in milliseconds

using Clock = std::chrono::steady_clock;
constexpr Clock::time_point kNever = Clock::time_point::max();

inline Clock::time_point deadline_in(int milliseconds) {
  return milliseconds == kForever ? kNever : Clock::now() + std::chrono::milliseconds(milliseconds);
}

class Stream;

// A point in a stream, which is reached when the first `position` tasks are done. A point without a stream is
// always reached.
struct Point {
  std::shared_ptr<Stream> stream;
  uint64_t position = 0;

  bool reached() const;
};

// A unit of work on a stream. If the device is in error, it is dropped instead of executed.
class Task {
 public:
  using Run = const char* (*)(void* state);
  using Destroy = void (*)(void* state);

  Task(std::string name, Run run, Destroy destroy, void* state)
      : name(std::move(name)), run_(run), destroy_(destroy), state_(state) {}
  // Creates a task that only waits for a point.
  Task(std::string name, Point point) : name(std::move(name)), after(std::move(point)) {}
  Task(Task&& other) noexcept
      : name(std::move(other.name)),
        after(std::move(other.after)),
        always(other.always),
        waits(other.waits),
        run_(other.run_),
        destroy_(std::exchange(other.destroy_, nullptr)),
        state_(other.state_) {}
  Task& operator=(Task&&) = delete;
  ~Task() {
    if (destroy_ != nullptr) {
      destroy_(state_);
    }
  }

  const char* run();

  std::string name;
  Point after;          // point that must be reached before the task runs
  bool always = false;  // runs even if the device is in error, because another stream may wait for it
  bool waits = false;   // may wait for something that is not on a stream: the host, or another process

 private:
  Run run_ = nullptr;
  Destroy destroy_ = nullptr;
  void* state_ = nullptr;
};

template <class Work>
Task make_task(std::string name, Work work) {
  using State = StreamWork<Work>;
  return Task(std::move(name), &State::run, &State::destroy, new State{std::move(work), {}});
}

class Stream {
 public:
  // `free`: whether tasks run as soon as they can. Otherwise a task runs only after run_next() or release()
  // has released it.
  Stream(int device, bool free);

  const int device;
  const int id;
  std::atomic<uint32_t> core_limits[2] = {};  // indexed by aclrtDevResLimitType; 0 means no limit

  // Adds a task and returns its position, which is reached when the task is done.
  uint64_t add(Task task);
  uint64_t added();
  uint64_t finished() const { return finished_; }
  bool reached(uint64_t position) const { return finished_ >= position; }

  // Waits until the position is reached; returns false after the deadline. Does not release tasks.
  bool wait(uint64_t position, Clock::time_point deadline);

  // Releases the next task up to `position` and waits until it is done; returns false after the deadline.
  // Unless `patient`, does not wait for a task that itself may wait for something.
  bool run_next(uint64_t position, bool patient, Clock::time_point deadline);

  // Describes the next task that is neither done nor released.
  struct Next {
    bool exists = false;
    Point after;          // the point that the task waits for; no stream if that is reached
    uint64_t number = 0;  // sequence number among the tasks of all streams
  };
  Next next();

  // Releases all tasks.
  void release();

  // Stops the stream: its thread executes the queued tasks and ends. No task may be added afterwards.
  static void stop(const std::shared_ptr<Stream>& stream);

  // Starts the stream's thread unless it runs already. This is done for the first task, because frameworks
  // create many streams and use few of them.
  static void start(const std::shared_ptr<Stream>& stream);

 private:
  struct Queued {
    Task task;
    uint64_t number;
  };

  void work();
  void run(Task* task);

  std::mutex mutex_;
  std::condition_variable wake_, progress_;
  std::deque<Queued> tasks_;  // tasks that are not running yet
  uint64_t added_ = 0, allowed_ = 0;
  std::atomic<uint64_t> finished_{0};
  bool free_, running_waits_ = false, started_ = false, stopping_ = false;
};

inline bool Point::reached() const { return stream == nullptr || stream->reached(position); }

// Stores the stream of a handle in `stream`. A null handle means the default stream of the thread's device.
// Fails if the device is in error.
aclError find_stream(const char* call, aclrtStream handle, std::shared_ptr<Stream>* stream);

// Puts the task on a stream, and stores the point at which the task is done in `point`.
aclError submit(const char* call, aclrtStream handle, Task task, Point* point = nullptr);

// Returns the end points of all streams of a device, or of all devices if `device` is -1, in the order in
// which the streams were created.
std::vector<Point> ends_of_streams(int device);

}  // namespace rec_sdk::emulator
