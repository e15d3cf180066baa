#include "stream.h"

#include <atomic>
#include <chrono>
#include <thread>

#include "devices.h"
#include "errors.h"

namespace rec_sdk::emulator {
namespace {

std::atomic<int> next_id{0};

}  // namespace

Stream::Stream(int device) : device(device), id(next_id++) {}

void Stream::add(Task task) {
  const std::lock_guard<std::mutex> lock(mutex_);
  tasks_.push_back(std::move(task));
  ++added_;
  wake_.notify_one();
}

bool Stream::done() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return finished_ == added_;
}

bool Stream::synchronize(int timeout) {
  std::unique_lock<std::mutex> lock(mutex_);
  const uint64_t target = added_;
  const auto reached = [&] { return finished_ >= target; };
  if (timeout == kForever) {
    progress_.wait(lock, reached);
    return true;
  }
  return progress_.wait_for(lock, std::chrono::milliseconds(timeout), reached);
}

void Stream::start(const std::shared_ptr<Stream>& stream) {
  const std::lock_guard<std::mutex> lock(stream->mutex_);
  if (!stream->started_) {
    stream->started_ = true;
    // Detached, and owning the stream: a process may end, or fork, with streams alive.
    std::thread([stream] { stream->work(); }).detach();
  }
}

void Stream::stop(const std::shared_ptr<Stream>& stream) {
  const std::lock_guard<std::mutex> lock(stream->mutex_);
  stream->stopping_ = true;
  stream->wake_.notify_one();
}

void Stream::work() {
  set_current_device(device);
  std::unique_lock<std::mutex> lock(mutex_);
  for (;;) {
    wake_.wait(lock, [&] { return stopping_ || !tasks_.empty(); });
    if (tasks_.empty()) {
      return;
    }
    {
      Task task = std::move(tasks_.front());
      tasks_.pop_front();
      lock.unlock();
      run(&task);
    }  // the task's state is gone before anybody learns that it is done
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
