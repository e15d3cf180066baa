// A stream: work that a thread of its own does in order.
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

constexpr int kForever = -1;  // a timeout, in milliseconds

using Clock = std::chrono::steady_clock;
constexpr Clock::time_point kNever = Clock::time_point::max();

inline Clock::time_point deadline_in(int milliseconds) {
  return milliseconds == kForever ? kNever : Clock::now() + std::chrono::milliseconds(milliseconds);
}

class Stream;

// All that was put on a stream up to some moment: its first `position` tasks. Without a stream there are
// none.
struct Point {
  std::shared_ptr<Stream> stream;
  uint64_t position = 0;

  bool reached() const;
};

// One piece of work. It is dropped, not run, if the device is in error by then.
class Task {
 public:
  using Run = const char* (*)(void* state);
  using Destroy = void (*)(void* state);

  Task(std::string name, Run run, Destroy destroy, void* state)
      : name(std::move(name)), run_(run), destroy_(destroy), state_(state) {}
  // Only waits.
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
  Point after;          // what must be reached first
  bool always = false;  // runs even on a device in error: another stream waits for it
  bool waits = false;   // for what is not on a stream: the host, or another process

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
  // `free`: tasks run as soon as they can. Otherwise each is let go by `run_next`.
  Stream(int device, bool free);

  const int device;
  const int id;
  std::atomic<uint32_t> core_limits[2] = {};  // by aclrtDevResLimitType; 0: none

  // The position that is reached when the task is done.
  uint64_t add(Task task);
  uint64_t added();
  uint64_t finished() const { return finished_; }
  bool reached(uint64_t position) const { return finished_ >= position; }

  // Waits for tasks that run by themselves; false if it is too late.
  bool wait(uint64_t position, Clock::time_point deadline);

  // Lets the next of the first `position` tasks run, and waits for it. A call that is not `patient` does not
  // wait for a task that waits itself. False if it is too late.
  bool run_next(uint64_t position, bool patient, Clock::time_point deadline);

  // The next task, if it is neither done nor let go.
  struct Next {
    bool exists = false;
    Point after;          // what it waits for, unless that is reached
    uint64_t number = 0;  // of all tasks of all streams, in the order in which they were added
  };
  Next next();

  // Lets go all there is.
  void release();

  // Queued tasks are still done; nothing can be added any more.
  static void stop(const std::shared_ptr<Stream>& stream);

  // The thread starts with the first task, since frameworks make many streams and use few.
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
  std::deque<Queued> tasks_;  // those that do not run yet
  uint64_t added_ = 0, allowed_ = 0;
  std::atomic<uint64_t> finished_{0};
  bool free_, running_waits_ = false, started_ = false, stopping_ = false;
};

inline bool Point::reached() const { return stream == nullptr || stream->reached(position); }

// The stream of a handle; null is the default stream of the thread's device. The device is checked for an
// error.
aclError find_stream(const char* call, aclrtStream handle, std::shared_ptr<Stream>* stream);

// Puts the task on a stream; `point` is where it is done.
aclError submit(const char* call, aclrtStream handle, Task task, Point* point = nullptr);

// All that is on the streams of a device, or of all devices (-1), in the order in which these were made.
std::vector<Point> ends_of_streams(int device);

}  // namespace rec_sdk::emulator
