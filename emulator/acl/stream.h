// A stream: work that its own thread executes in order.
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

// A position in a stream: its first `position` tasks. Without a stream it is always reached.
struct Point {
  std::shared_ptr<Stream> stream;
  uint64_t position = 0;

  bool reached() const;
};

// A unit of work. It is dropped instead of executed if the device is in error.
class Task {
 public:
  using Run = const char* (*)(void* state);
  using Destroy = void (*)(void* state);

  Task(std::string name, Run run, Destroy destroy, void* state)
      : name(std::move(name)), run_(run), destroy_(destroy), state_(state) {}
  // A task that only waits for a point.
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
  Point after;          // point that must be reached first
  bool always = false;  // runs even on a device in error, because another stream waits for it
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
  // `free`: tasks run as soon as they can. Otherwise run_next() releases each task.
  Stream(int device, bool free);

  const int device;
  const int id;
  std::atomic<uint32_t> core_limits[2] = {};  // indexed by aclrtDevResLimitType; 0: no limit

  // Adds a task and returns the position that is reached when it is done.
  uint64_t add(Task task);
  uint64_t added();
  uint64_t finished() const { return finished_; }
  bool reached(uint64_t position) const { return finished_ >= position; }

  // Waits for the position, with tasks that run by themselves; returns false after the deadline.
  bool wait(uint64_t position, Clock::time_point deadline);

  // Releases the next of the first `position` tasks and waits for it; returns false after the deadline.
  // Unless `patient`, it does not wait for a task that itself waits.
  bool run_next(uint64_t position, bool patient, Clock::time_point deadline);

  // The next task that is neither done nor released.
  struct Next {
    bool exists = false;
    Point after;          // the point that it waits for, unless it is reached
    uint64_t number = 0;  // sequence number among the tasks of all streams
  };
  Next next();

  // Releases all tasks.
  void release();

  // Stops the stream: queued tasks are still executed, and no task can be added.
  static void stop(const std::shared_ptr<Stream>& stream);

  // The thread starts with the first task, because frameworks create many streams and use few.
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
  std::deque<Queued> tasks_;  // tasks that do not run yet
  uint64_t added_ = 0, allowed_ = 0;
  std::atomic<uint64_t> finished_{0};
  bool free_, running_waits_ = false, started_ = false, stopping_ = false;
};

inline bool Point::reached() const { return stream == nullptr || stream->reached(position); }

// Returns the stream of a handle; null is the default stream of the thread's device. Fails if the device is
// in error.
aclError find_stream(const char* call, aclrtStream handle, std::shared_ptr<Stream>* stream);

// Puts the task on a stream; `point` receives the point at which it is done.
aclError submit(const char* call, aclrtStream handle, Task task, Point* point = nullptr);

// Returns the ends of the streams of a device, or of all devices (-1), in the order of their creation.
std::vector<Point> ends_of_streams(int device);

}  // namespace rec_sdk::emulator
