#include "stream.h"

#include <algorithm>
#include <thread>

#include "devices.h"
#include "errors.h"

namespace rec_sdk::emulator {
namespace {

constexpr uint64_t kAll = UINT64_MAX;

std::atomic<int> next_id{0};
std::atomic<uint64_t> next_number{0};

}  // namespace

const char* Task::run() {
  if (after.stream != nullptr) {
    after.stream->wait(after.position, kNever);
  }
  return run_ == nullptr ? nullptr : run_(state_);
}

Stream::Stream(int device, bool free)
    : device(device), id(next_id++), allowed_(free ? kAll : 0), free_(free) {}

uint64_t Stream::add(Task task) {
  const std::lock_guard<std::mutex> lock(mutex_);
  tasks_.push_back({std::move(task), next_number++});
  wake_.notify_one();
  return ++added_;
}

uint64_t Stream::added() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return added_;
}

bool Stream::wait(uint64_t position, Clock::time_point deadline) {
  std::unique_lock<std::mutex> lock(mutex_);
  const auto done = [&] { return finished_ >= position; };
  if (deadline == kNever) {
    progress_.wait(lock, done);
    return true;
  }
  return progress_.wait_until(lock, deadline, done);
}

bool Stream::run_next(uint64_t position, bool patient, Clock::time_point deadline) {
  uint64_t target;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (finished_ >= std::min(position, added_)) {
      return true;
    }
    target = finished_ + 1;
    if (allowed_ < target) {
      const Task& next = tasks_.front().task;
      running_waits_ = next.waits || !next.after.reached();
      allowed_ = target;
      wake_.notify_one();
    }
    if (!patient && running_waits_) {
      return true;
    }
  }
  return wait(target, deadline);
}

Stream::Next Stream::next() {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (finished_ == added_ || allowed_ > finished_) {
    return {};
  }
  const Queued& front = tasks_.front();
  return {true, front.task.after.reached() ? Point{} : front.task.after, front.number};
}

void Stream::release() {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (allowed_ < added_) {
    allowed_ = added_;
    running_waits_ = true;  // one of the released tasks may wait
    wake_.notify_one();
  }
}

void Stream::start(const std::shared_ptr<Stream>& stream) {
  const std::lock_guard<std::mutex> lock(stream->mutex_);
  if (!stream->started_) {
    stream->started_ = true;
    // The thread is detached and shares ownership of the stream, because a process may end or fork while
    // streams exist.
    std::thread([stream] { stream->work(); }).detach();
  }
}

void Stream::stop(const std::shared_ptr<Stream>& stream) {
  const std::lock_guard<std::mutex> lock(stream->mutex_);
  stream->stopping_ = true;
  stream->allowed_ = kAll;
  stream->wake_.notify_one();
}

void Stream::work() {
  set_current_device(device);
  std::unique_lock<std::mutex> lock(mutex_);
  for (;;) {
    wake_.wait(lock, [&] { return tasks_.empty() ? stopping_ : allowed_ > finished_; });
    if (tasks_.empty()) {
      return;
    }
    {
      Task task = std::move(tasks_.front().task);
      tasks_.pop_front();
      lock.unlock();
      run(&task);
    }  // destroys the task's state before other threads see it as done
    lock.lock();
    ++finished_;
    progress_.notify_all();
  }
}

void Stream::run(Task* task) {
  if (is_failed(device) && !task->always) {
    trace("stream %d: dropped %s", id, task->name.c_str());
    return;
  }
  trace("stream %d: %s", id, task->name.c_str());
  const char* error = task->run();
  if (error != nullptr) {
    fail_device(device, ACL_ERROR_RT_VECTOR_CORE_EXCEPTION,
                text("stream %d, %s: %s", id, task->name.c_str(), error));
  }
}

}  // namespace rec_sdk::emulator
