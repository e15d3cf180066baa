#include "scheduler.h"

#include <pthread.h>

#include <algorithm>
#include <chrono>
#include <random>
#include <thread>

#include "settings.h"

namespace rec_sdk::emulator {
namespace {

constexpr uint64_t kDepth = 1024;
constexpr auto kIdle = std::chrono::milliseconds(1000);
// How many milliseconds a query waits, at most, for the task that it releases. The time is limited, because
// the task may need work that is not on a stream yet.
constexpr int kGlance = 100;
constexpr uint64_t kMostAtOnce = 2;  // maximum number of tasks that a call runs with `random`

// The random numbers for the order of tasks, and the number of calls so far, from which watch() sees whether
// the program makes progress.
class RandomOrder {
 public:
  std::atomic<uint64_t> calls{0};
  std::atomic<bool> watched{false};

  // Returns a random integer from 0 to sides - 1.
  uint64_t roll(uint64_t sides) {
    const std::lock_guard<std::mutex> lock(mutex_);
    return random_() % sides;
  }

 private:
  std::mutex mutex_;
  std::mt19937_64 random_{settings().streams.seed};
};

std::atomic<RandomOrder*> made{nullptr};

// This object is never destroyed, because streams still run while the process ends.
RandomOrder& random_order() {
  if (made == nullptr) {
    auto* own = new RandomOrder;
    RandomOrder* none = nullptr;
    if (!made.compare_exchange_strong(none, own)) {
      delete own;
    }
  }
  return *made;
}

// A forked child uses a new object, because a thread of the parent, which does not exist in the child, may
// have held the lock. A pointer to the parent's object is kept, so that leak checkers do not report it.
RandomOrder* parent_order = nullptr;
[[maybe_unused]] const int registered_fork_handler =
    pthread_atfork(nullptr, nullptr, [] { parent_order = made.exchange(nullptr); });

// Returns the point towards which a task can run now: if the next task of `point`'s stream waits for another
// point, that point's origin, otherwise `point` itself.
Point origin(Point point) {
  for (;;) {
    Point before = point.stream->next().after;
    if (before.stream == nullptr) {
      return point;
    }
    point = std::move(before);
  }
}

// Runs one task that the point depends on, and waits for it; returns false after the deadline.
bool run_towards(const Point& point, Clock::time_point deadline) {
  const Point first = origin(point);
  return first.stream->run_next(first.position, true, deadline);
}

void glance_towards(const Point& point) {
  const Point first = origin(point);
  first.stream->run_next(first.position, false, deadline_in(kGlance));
}

// Runs up to kMostAtOnce tasks, chosen at random from the tasks that a device could run now.
void run_some() {
  for (uint64_t left = random_order().roll(kMostAtOnce + 1); left > 0; --left) {
    std::vector<Point> ready;
    for (Point& end : ends_of_streams(-1)) {
      const Stream::Next next = end.stream->next();
      if (next.exists && next.after.stream == nullptr) {
        ready.push_back(std::move(end));
      }
    }
    if (ready.empty()) {
      return;
    }
    glance_towards(ready[random_order().roll(ready.size())]);
  }
}

// Returns which of the points, none of which is reached, to run towards next.
const Point& choose(const std::vector<Point>& points) {
  if (settings().streams.order == StreamOrder::kRandom) {
    return points[random_order().roll(points.size())];
  }
  return *std::max_element(points.begin(), points.end(), [](const Point& a, const Point& b) {
    return a.stream->next().number < b.stream->next().number;
  });
}

uint64_t tasks_done() {
  uint64_t done = 0;
  for (const Point& end : ends_of_streams(-1)) {
    done += end.stream->finished();
  }
  return done;
}

// Releases all queued work whenever there was neither a call nor progress for kIdle.
void watch() {
  uint64_t last = UINT64_MAX;
  for (;;) {
    std::this_thread::sleep_for(kIdle);
    const uint64_t now = random_order().calls + tasks_done();
    if (now == last) {
      for (const Point& end : ends_of_streams(-1)) {
        end.stream->release();
      }
    }
    last = now;
  }
}

}  // namespace

bool runs_freely() { return settings().streams.order == StreamOrder::kEager; }

void on_call() {
  if (runs_freely()) {
    return;
  }
  ++random_order().calls;
  if (settings().streams.order == StreamOrder::kRandom) {
    run_some();
  }
}

Point put(const std::shared_ptr<Stream>& stream, Task task) {
  Stream::start(stream);
  const Point point{stream, stream->add(std::move(task))};
  if (runs_freely()) {
    return point;
  }
  if (!random_order().watched.exchange(true)) {
    std::thread(watch).detach();
  }
  if (!stream->reached(point.position - std::min(point.position, kDepth))) {
    glance_towards(point);
  }
  return point;
}

bool wait_for(std::vector<Point> points, Clock::time_point deadline) {
  for (;;) {
    points.erase(
        std::remove_if(points.begin(), points.end(), [](const Point& point) { return point.reached(); }),
        points.end());
    if (points.empty()) {
      return true;
    }
    if (runs_freely()) {
      if (!points.front().stream->wait(points.front().position, deadline)) {
        return false;
      }
    } else if (!run_towards(choose(points), deadline)) {
      return false;
    } else if (settings().streams.order == StreamOrder::kRandom) {
      run_some();
    }
  }
}

void asked(const Point& point) {
  if (!runs_freely() && !point.reached()) {
    glance_towards(point);
  }
}

}  // namespace rec_sdk::emulator
