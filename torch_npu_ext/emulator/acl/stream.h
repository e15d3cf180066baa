// A stream: work that a thread of its own does in order.
#pragma once

#include <acl/acl.h>

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <utility>

#include "emulator.h"

namespace rec_sdk::emulator {

constexpr int kForever = -1;  // a timeout, in milliseconds

// One piece of work. It is dropped, not run, if the device is in error by then.
class Task {
 public:
  using Run = const char* (*)(void* state);
  using Destroy = void (*)(void* state);

  Task(std::string name, Run run, Destroy destroy, void* state)
      : name(std::move(name)), run_(run), destroy_(destroy), state_(state) {}
  Task(Task&& other) noexcept
      : name(std::move(other.name)),
        always(other.always),
        run_(other.run_),
        destroy_(std::exchange(other.destroy_, nullptr)),
        state_(other.state_) {}
  Task& operator=(Task&&) = delete;
  ~Task() {
    if (destroy_ != nullptr) {
      destroy_(state_);
    }
  }

  const char* run() { return run_(state_); }

  std::string name;
  bool always = false;  // runs even on a device in error: somebody waits for it

 private:
  Run run_;
  Destroy destroy_;
  void* state_;
};

template <class Work>
Task make_task(std::string name, Work work) {
  using State = StreamWork<Work>;
  return Task(std::move(name), &State::run, &State::destroy, new State{std::move(work), {}});
}

class Stream {
 public:
  explicit Stream(int device);

  const int device;
  const int id;

  void add(Task task);
  bool done();

  // Waits for all that was added before; false if the time (milliseconds) is over.
  bool synchronize(int timeout);

  // What is queued is still done; nothing can be added any more.
  static void stop(const std::shared_ptr<Stream>& stream);

  // The thread starts with the first task, since frameworks make many streams and use few.
  static void start(const std::shared_ptr<Stream>& stream);

 private:
  void work();
  void run(Task* task);

  std::mutex mutex_;
  std::condition_variable wake_, progress_;
  std::deque<Task> tasks_;
  uint64_t added_ = 0, finished_ = 0;
  bool started_ = false, stopping_ = false;
};

// The stream of a handle; null is the default stream of the thread's device. The device is checked for an
// error.
aclError find_stream(const char* call, aclrtStream handle, std::shared_ptr<Stream>* stream);

// Puts the task on a stream.
aclError submit(const char* call, aclrtStream handle, Task task);

// Waits for all streams of a device; false if the time (milliseconds) is over.
bool synchronize_streams(int device, int timeout);

}  // namespace rec_sdk::emulator
